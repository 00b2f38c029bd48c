# Sourced: builds the Python package and installs it with torch in a virtual environment. PYTHON
# names the interpreter (3.11 or newer), VENV the environment's folder.
. scripts/set-up.sh

venv=${VENV:-.venv-python}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    "$venv/bin/pip" install -q torch --index-url https://download.pytorch.org/whl/cpu
fi
"$venv/bin/pip" install -q './python[test]'
