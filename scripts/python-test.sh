#!/bin/sh
# Tests the Python package against plain torch; arguments go to pytest. Installs what it needs; see
# python-set-up.sh.
set -eu
cd "$(dirname "$0")/.."
. scripts/python-set-up.sh
exec "$venv/bin/python" -m pytest python/tests "$@"
