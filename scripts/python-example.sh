#!/bin/sh
# Trains the Python example with two ranks. Installs what it needs; see python-set-up.sh.
set -eu
cd "$(dirname "$0")/.."
. scripts/python-set-up.sh
exec "$venv/bin/python" -m torch.distributed.run --nproc-per-node 2 python/examples/train_gpt.py
