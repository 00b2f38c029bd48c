#!/bin/sh
# Counts the instructions of small programs, and compares them with scripts/instructions.txt:
# instructions an element, or a parameter of the engine. One that takes 3 % more fails.
# `scripts/instructions.sh --update` writes the table anew.
#
# callgrind counts, whatever else the machine does. It knows no AVX-512, so that what is counted is
# the AVX2 path. Installs valgrind where there is none.
set -eu
cd "$(dirname "$0")/.."
. scripts/set-up.sh

table=scripts/instructions.txt
case "$(uname -m) ${1:-}" in
    'x86_64 ' | 'x86_64 --update') ;;
    x86_64*) fail 'allowed: no argument, or --update' ;;
    *)
        echo "instructions: nothing is compared: $table is of x86-64, and this is $(uname -m)" >&2
        exit 0
        ;;
esac
if ! command -v valgrind >/dev/null 2>&1; then
    install valgrind
    command -v valgrind >/dev/null 2>&1 || fail 'no valgrind, which counts the instructions'
fi

cargo build --release -p oxizero --example instructions --locked
programs="${CARGO_TARGET_DIR:-target}/release/examples/instructions"
counted=$(mktemp)
trap 'rm -f "$counted"' EXIT

# The instructions of one program.
count() {
    OXIZERO_SIMD=avx2 valgrind --tool=callgrind --callgrind-out-file=/dev/null \
        --collect-atstart=no --toggle-collect='*count_instructions_of*' "$programs" "$1" 2>&1 |
        sed -n 's/^==[0-9]*== Collected : //p'
}

"$programs" | while read -r name elements; do
    echo "$name $(count "$name") $elements"
done | awk '
    NF != 3 || $2 == 0 { print "instructions: " $1 " was not counted" > "/dev/stderr"; exit 1 }
    { printf "%-24s %12.3f\n", $1, $2 / $3 }
' >"$counted"

if [ "${1:-}" = --update ]; then
    cp "$counted" "$table"
    echo "instructions: $table is written anew"
    exit 0
fi
awk '
    NR == FNR { expected[$1] = $2; next }
    {
        seen[$1] = 1
        if (!($1 in expected)) { note = "it is new"; bad = 1 }
        else if ($2 > 1.03 * expected[$1]) { note = "more than " expected[$1]; bad = 1 }
        else if ($2 < 0.97 * expected[$1]) note = "fewer than " expected[$1]
        else note = ""
        print $0 (note == "" ? "" : "   " note)
    }
    END {
        for (name in expected)
            if (!(name in seen)) { print name " is gone"; bad = 1 }
        exit bad
    }
' "$table" "$counted" || {
    echo 'instructions: if that is meant to be, run scripts/instructions.sh --update' >&2
    rustc --version >&2
    exit 1
}
