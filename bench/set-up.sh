#!/bin/sh
# Makes a virtual environment with what bench/*.py compares: oxizero, and DeepSpeed of a pinned
# version beside the torch that it is compared on; 5.5 GB. PYTHON names an interpreter of 3.11 or
# 3.12, VENV the folder.
#
# Then: target/bench/bin/python bench/train.py
set -eu
cd "$(dirname "$0")/.."
. scripts/set-up.sh

venv=$(realpath -ms "${VENV:-target/bench}")
if [ ! -x "$venv/bin/pip" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
mkdir -p "$venv/tmp"
export TMPDIR="$venv/tmp"
"$venv/bin/pip" install -q --no-cache-dir \
    torch==2.15.0 deepspeed==0.19.8 numpy maturin==1.16.0 setuptools
PATH="$venv/bin:$PATH" "$venv/bin/pip" install -q --no-build-isolation --no-deps \
    --force-reinstall ./python
rm -rf "$venv/tmp"

# DeepSpeed compiles its operators when they are first used, one minute each.
PATH="$venv/bin:$PATH" DS_ACCELERATOR=cpu "$venv/bin/python" - <<'PYTHON'
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder

for operator in (FusedAdamBuilder, CPUAdamBuilder, ShareMemCommBuilder):
    operator().load(verbose=False)
PYTHON
