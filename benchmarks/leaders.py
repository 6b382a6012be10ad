"""Leaders that exchange models in a ring against a star, between network namespaces at 100 Mbit/s.

Each of 4, 6 and 8 leaders is on its own board. The ring is the one that deployments use, timed from finding each other
to the mean; the star is plain torch over gloo, with its hub on its own board, too. Both are compared with virtual time.
"""

import sys
from collections.abc import Sequence

from benchmarks.harness import Row, less_is_better, main
from socflower.hierarchy import Exchange, GradientExchange, exchange_graph
from socflower.sim import EventClock
from tests.testbed.ring_driver import Run
from tests.testbed.testbed import measure
from tests.testbed.topology import Rack

NUM_BYTES = 4_000_000
NUM_STEPS = 6
_SETTING_UP_S = 120.0


def run(quick: bool = False) -> list[Row]:
    """Return rows of a synchronisation's median time, and of virtual time against it."""
    rack = Rack(slots_per_board=(1,) * 9)
    runs = [
        Run(
            transport=transport,
            rings=(members,),
            num_bytes=NUM_BYTES,
            num_steps=3 if quick else NUM_STEPS,
        )
        for count in ((4,) if quick else (4, 6, 8))
        for transport, members in (
            ("leaders", tuple(range(1, count + 1))),
            ("star", tuple(range(count + 1))),
        )
    ]
    measured = list(measure(rack, runs, timeout_s=_SETTING_UP_S + 40.0 * len(runs)))
    rows = []
    for ring, star in zip(measured[::2], measured[1::2], strict=True):
        leaders = f"{len(ring.run.rings[0])} leaders"
        ring_s, star_s = ring.median_s(0), star.median_s(0)
        rows.append(
            less_is_better(
                f"{leaders}, 4 MB: ring",
                ring_s,
                "star over gloo",
                star_s,
                "s",
                ok=ring.right and star.right,
            )
        )
        for name, result, seconds in (("ring", ring, ring_s), ("star", star, star_s)):
            simulated_s = _simulated_s(rack, result.run.rings[0], name)
            rows.append(
                less_is_better(
                    f"{leaders}, 4 MB: {name} in virtual time",
                    simulated_s,
                    "measured",
                    seconds,
                    "s",
                    ok=result.right,
                )
            )
    return rows


def _simulated_s(rack: Rack, members: Sequence[int], name: str) -> float:
    exchange = Exchange(num_bytes=NUM_BYTES, num_tensors=1)
    graph = exchange_graph(
        members, exchange, GradientExchange(kind="ring" if name == "ring" else "server")
    )
    return EventClock(rack.cluster()).run(graph).duration_s


if __name__ == "__main__":
    sys.exit(main(run))
