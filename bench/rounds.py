"""Rounds that go through all that is compared, so that what else a machine does meets all of it."""

import json
import os
import statistics
import sys

from ranks import Failed


def interleave(engines, count):
    """Calls each engine's `measure()`, which returns values by what was measured, in turn and in
    so many rounds. The medians, by engine; one that cannot run here is left out by name."""
    results = {name: {} for name in engines}
    for _ in range(count):
        for name in list(results):
            try:
                measured = engines[name]()
            except Failed as failed:
                reason = str(failed).strip().splitlines()[-1]
                print(f"{name} is left out: {reason}", file=sys.stderr)
                del results[name]
                continue
            for what, value in measured.items():
                results[name].setdefault(what, []).append(value)
    return {
        name: {what: statistics.median(values) for what, values in one.items()}
        for name, one in results.items()
    }


def tell(title, head, lines, rows, file):
    """Prints a table in Markdown, and adds the rows to a file, a JSON object a line."""
    print(f"{title}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n")
    for cells in [head, ["---"] * len(head), *lines]:
        print("| " + " | ".join(cells) + " |")
    print(flush=True)
    if file:
        with open(file, "a", encoding="utf-8") as written:
            written.writelines(json.dumps(row) + "\n" for row in rows)
