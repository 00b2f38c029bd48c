#!/bin/sh
# Tests the crates that hold unsafe code of the ranks' memory under the address sanitizer; arguments
# go to `cargo test`. It builds into a folder of its own, and takes some minutes.
set -eu
cd "$(dirname "$0")/.."
. scripts/set-up.sh
# The sanitizer is a flag of nightly compilers, which a stable one takes when it is told that it is
# one. A target that is named keeps the flag from build scripts and macros.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS='-Zsanitizer=address'
# Leaks are not looked for: that opens files, of which a test leaves none.
export ASAN_OPTIONS=detect_leaks=0
exec cargo test --release --locked --target "$(rustc -vV | sed -n 's/^host: //p')" \
    --target-dir "${CARGO_TARGET_DIR:-target}/sanitize" -p oxizero-device -p oxizero-comm "$@"
