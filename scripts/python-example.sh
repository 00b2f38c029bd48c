#!/bin/sh
# Builds the Python package and trains the example with two ranks, in a virtual environment of its
# own. PYTHON names the interpreter (3.11 or newer), VENV the environment's folder.
set -eu
cd "$(dirname "$0")/.."
. scripts/set-up.sh

venv=${VENV:-.venv-python}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    "$venv/bin/pip" install -q torch --index-url https://download.pytorch.org/whl/cpu
fi
"$venv/bin/pip" install -q ./python
exec "$venv/bin/python" -m torch.distributed.run --nproc-per-node 2 python/examples/train_gpt.py
