# Sourced: builds the Python package and installs it in a virtual environment; see
# python-environment.sh.
. scripts/python-environment.sh

pip install -q --no-build-isolation --no-deps --force-reinstall ./python
