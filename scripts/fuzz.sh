#!/bin/sh
# Reads checkpoints whose files a fuzzer makes up, for so many seconds (60 if not said), under the
# address sanitizer. Needs a C++ compiler. It builds into a folder of its own, where inputs stay.
set -eu
cd "$(dirname "$0")/.."
. scripts/set-up.sh
command -v c++ >/dev/null 2>&1 || install g++
target=$(realpath -ms "${CARGO_TARGET_DIR:-target}")/fuzz
mkdir -p "$target/inputs" "$target/found"
# Flags of nightly compilers; see sanitize.sh.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address --cfg fuzzing -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Cdebug-assertions"
exec cargo run --release --locked --manifest-path crates/checkpoint/fuzz/Cargo.toml \
    --target "$(rustc -vV | sed -n 's/^host: //p')" --target-dir "$target" -- \
    "$target/inputs" -max_total_time="${1:-60}" -max_len=16384 -artifact_prefix="$target/found/"
