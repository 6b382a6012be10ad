"""Measure all cases, over every transport and for both sizes, and compare them with the simulator.

    python -m tests.testbed.measure [--json] [--small] [--transports gloo,grpc]

`--json` prints the document of docs/results/testbed.json, `--small` leaves out the 37 MB; 0 if the simulator was
within its tolerance everywhere.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from benchmarks.harness import machine
from tests.testbed.cases import CASES, RACK, SMALL_BYTES, TOLERANCE, VGG11_BYTES, Case
from tests.testbed.comparison import Gain, Row, compare, gains
from tests.testbed.prediction import predicted_ends_s
from tests.testbed.ring_driver import Run
from tests.testbed.testbed import measure, missing
from tests.testbed.topology import GOODPUT, MESSAGE_S

_SETTING_UP_S = 120.0  # importing torch on a busy machine, and opening each ring


def main() -> int:
    """Measure, print as results come in, and say whether all was well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one document instead of lines")
    parser.add_argument("--small", action="store_true", help="4 MB only")
    parser.add_argument(
        "--transports", default="gloo,grpc", help="comma-separated (default: %(default)s)"
    )
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    rows: list[Row] = []
    for row in measured_rows(
        options.transports.split(","),
        (SMALL_BYTES,) if options.small else (SMALL_BYTES, VGG11_BYTES),
    ):
        rows.append(row)
        print(line(row), file=sys.stderr if options.json else sys.stdout, flush=True)
    gained = gains(rows)
    if options.json:
        print(json.dumps(document(rows, gained), indent=2))
    else:
        for gain in gained:
            print(
                f"{gain.transport}, {gain.num_bytes / 1e6:.0f} MB: taking turns is {gain.measured:.2f} times as fast "
                f"(simulated {gain.simulated:.2f}, {gain.bracket[0]:.2f} to {gain.bracket[1]:.2f}; closed form "
                f"{gain.closed_form:.2f}){'' if gain.ok else '  MISSED'}"
            )
    return 0 if all(row.ok for row in rows) and all(gain.ok for gain in gained) else 1


def measured_rows(
    transports: Sequence[str], sizes: Sequence[int], cases: Sequence[Case] = CASES
) -> Iterator[Row]:
    """Build the rack once, and yield the rows of each case as it ends."""
    todo = [
        (case, case.run(transport, num_bytes))
        for num_bytes in sizes
        for transport in transports
        for case in cases
    ]
    results = measure(
        RACK, [run for _, run in todo], timeout_s=time_needed_s([run for _, run in todo])
    )
    for (case, _), result in zip(todo, results, strict=True):
        yield from compare(RACK, case, result)


def time_needed_s(runs: Sequence[Run]) -> float:
    """Return after how many seconds something must be wrong: three times what the simulator says, and setting up."""
    simulated_s = sum(
        max(ends[-1] for ends in predicted_ends_s(RACK, run)) * run.num_steps / (run.num_steps - 1)
        for run in runs
    )
    return _SETTING_UP_S + 3.0 * simulated_s + 10.0 * len(runs)


def document(rows: Sequence[Row], gained: Sequence[Gain]) -> dict[str, object]:
    """Return the whole table, with everything that the simulator was told."""
    return {
        "schema": 1,
        "machine": machine(),
        "rack": asdict(RACK),
        "goodput": GOODPUT,
        "message_s": MESSAGE_S,
        "tolerance": TOLERANCE,
        "cases": {case.name: case.question for case in CASES},
        "rows": [asdict(row) for row in rows],
        "gains": [asdict(gain) for gain in gained],
    }


def line(row: Row) -> str:
    """Return a row for people."""
    between = (
        "" if row.bracket_s is None else f" ({row.bracket_s[0]:.3f} to {row.bracket_s[1]:.3f})"
    )
    return (
        f"{row.case}, {row.transport}, {row.num_bytes / 1e6:.0f} MB, ring {row.ring} of {len(row.members)}: "
        f"{row.measured_s:.3f} s, simulated {row.simulated_s:.3f} s{between}, {row.error:+.1%}; closed form "
        f"{row.closed_form_s:.3f} s; {row.cpu_s:.1f} CPU-s{'' if row.ok else '  MISSED'}"
    )


if __name__ == "__main__":
    sys.exit(main())
