# Sourced: makes a virtual environment with what the Python package's tests need. PYTHON names the
# interpreter, VENV the environment's folder.
. scripts/set-up.sh

# Whole paths: pip builds in another folder.
CARGO_TARGET_DIR=$(realpath -ms "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR
venv=$(realpath -ms "${VENV:-$CARGO_TARGET_DIR/python}")

# The first Python of 3.11 or newer that makes virtual environments; nothing where there is none.
find_python() {
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'; then
            echo "$name"
            return
        fi
    done 2>/dev/null
}

pip() {
    PATH="$venv/bin:$PATH" "$venv/bin/python" -m pip --disable-pip-version-check "$@"
}

if ! pip --version >/dev/null 2>&1; then
    for packages in 'python3 python3-venv' 'python3.11 python3.11-venv'; do
        [ -n "$(find_python)" ] || install "$packages"
    done
    [ -n "$(find_python)" ] || fail 'no Python of 3.11 or newer that has `venv`; name one in PYTHON'
    "$(find_python)" -m venv --clear "$venv"
fi

# Large files go through the environment's folder: elsewhere temporary ones may lie in memory.
requirements=python/requirements.txt
if ! cmp -s "$requirements" "$venv/requirements.txt"; then
    echo "set-up: installs what $requirements lists in $venv; torch is 2.7 GB" >&2
    mkdir -p "$venv/tmp"
    (export TMPDIR="$venv/tmp"; pip install -q --no-cache-dir --no-compile -r "$requirements")
    rm -rf "$venv/tmp"
    cp "$requirements" "$venv"
fi
