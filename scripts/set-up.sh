# Sourced by the scripts: finds cargo, and installs a C compiler where there is none.
# Needs no root where nothing is missing; else it asks apt-get, through sudo if need be.

fail() {
    printf 'set-up: %s\n' "$1" >&2
    exit 1
}

# Cargo is often installed but not in PATH: for a service's user, or with HOME set elsewhere.
if ! cargo --version >/dev/null 2>&1; then
    for home in "${HOME:-/nowhere}" "$(getent passwd "$(id -u)" | cut -d: -f6)"; do
        if [ -x "$home/.cargo/bin/cargo" ]; then
            PATH="$home/.cargo/bin:$PATH"
            [ -d "$home/.rustup" ] && export RUSTUP_HOME="${RUSTUP_HOME:-$home/.rustup}"
            export PATH
            break
        fi
    done
fi
cargo --version >/dev/null 2>&1 || fail 'cargo does not run; install Rust from https://rustup.rs'

# Installs Debian packages (names separated by spaces); what failed, the caller finds missing.
install() {
    as_root=''
    if [ "$(id -u)" -ne 0 ]; then
        as_root='sudo'
    fi
    for tool in apt-get $as_root; do
        command -v "$tool" >/dev/null 2>&1 || fail "no $tool to install $1; install them yourself"
    done
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2 || true
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $1 >&2 || true
}

if ! command -v cc >/dev/null 2>&1; then
    install 'gcc libc6-dev'
    command -v cc >/dev/null 2>&1 || fail 'no C compiler `cc`; install gcc or clang'
fi
