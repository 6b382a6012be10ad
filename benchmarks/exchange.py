"""One gradient exchange in virtual time, against the eight latencies that SoCFlow+ section 2.2 reports (Fig. 2b).

The two network constants of the catalogue were fitted to these eight, so agreement alone proves little. Each is
therefore also predicted from the other seven: constants are fitted without it, so that the largest log error of the
closed forms is smallest, and the closed form with those constants predicts it.

With a third constant, the rate across boards, all eight are within 9 %. A ninth figure is nearer, too: the paper calls
1,300 of the 2,225 ms of ResNet-18 in a ring over 32 SoCs the start of transfers, which is the handling of messages
here. But the worst prediction of a figure that is left out gets worse, so eight figures do not justify it, and the
catalogue has two constants. Costs of each sub-step, of each exchange, of messages across boards, and of messages or
bytes at a server were tried as well; none was better than 13 %.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.harness import Row, less_is_better, more_is_better
from socflower.cluster import parse_cluster
from socflower.cluster.device_catalog import link_bytes_per_s, message_s
from socflower.hierarchy import Exchange, GradientExchange, exchange_graph
from socflower.sim import EventClock

SOCS_PER_BOARD = 5
TOLERANCE = 0.15
# Two constants cannot follow every model and size; the rows show the errors.
UNSEEN_TOLERANCE = 0.20
PEER = "SoCFlow+ Fig. 2b"
MODELS = {
    "VGG-11": Exchange(num_bytes=4.0 * 9_225_610, num_tensors=18),
    "ResNet-18": Exchange(num_bytes=4.0 * 11_173_962, num_tensors=62),
}


@dataclass(frozen=True, slots=True)
class Latency:
    """One published figure."""

    model: str
    kind: Literal["ring", "server"]
    # Five are one board; 32 are spread over seven.
    num_socs: int
    published_ms: float

    @property
    def case(self) -> str:
        """The figure's name in a row."""
        return f"{self.model}, {'ring' if self.kind == 'ring' else 'parameter server'}, {self.num_socs} SoCs"

    def simulated_ms(self) -> float:
        """Return the exchange's duration on the event clock."""
        cluster = parse_cluster({"boards": 7, "socs_per_board": SOCS_PER_BOARD})
        graph = exchange_graph(
            range(self.num_socs), MODELS[self.model], GradientExchange(kind=self.kind)
        )
        return 1e3 * EventClock(cluster).run(graph).duration_s

    def closed_form_ms(
        self, per_message_s: Any, bytes_per_s: Any, across_bytes_per_s: Any = math.inf
    ) -> Any:
        """Return 2(n-1) * tensors * a + bytes / B; a link carries 2(n-1)/n models in a ring, 2(n-1) at a server.

        With 32 SoCs, the slowest link decides a ring's speed, and 27 of the 31 uploads to a server cross boards.
        """
        exchange, steps = MODELS[self.model], 2 * (self.num_socs - 1)
        models = steps / self.num_socs if self.kind == "ring" else steps
        seconds = models / bytes_per_s
        if self.num_socs > SOCS_PER_BOARD:
            apart = 1.0 if self.kind == "ring" else 1.0 - (SOCS_PER_BOARD - 1) / (self.num_socs - 1)
            seconds = np.maximum(seconds, models * apart / across_bytes_per_s)
        return 1e3 * (steps * exchange.num_tensors * per_message_s + exchange.num_bytes * seconds)


LATENCIES = (
    Latency("VGG-11", "ring", 5, 540.0),
    Latency("VGG-11", "ring", 32, 1248.0),
    Latency("VGG-11", "server", 5, 2060.0),
    Latency("VGG-11", "server", 32, 20593.0),
    Latency("ResNet-18", "ring", 5, 699.0),
    Latency("ResNet-18", "ring", 32, 2225.0),
    Latency("ResNet-18", "server", 5, 2700.0),
    Latency("ResNet-18", "server", 32, 26505.0),
)


def fit(latencies: tuple[Latency, ...], num_constants: int = 2) -> tuple[float, ...]:
    """Return the constants that minimise the largest |log(model / published)|.

    They are (seconds per message, bytes per second[, bytes per second across boards]). The search narrows a grid
    around its best point.
    """
    low, high = (
        np.array([1e-4, 80e6, 80e6])[:num_constants],
        np.array([1e-3, 200e6, 200e6])[:num_constants],
    )
    best = (low + high) / 2
    for _ in range(60):
        axes = [
            np.linspace(least, most, 41 if num_constants == 2 else 21)
            for least, most in zip(low, high, strict=True)
        ]
        points = np.meshgrid(*axes, indexing="ij")
        worst = np.max(
            [
                np.abs(np.log(latency.closed_form_ms(*points) / latency.published_ms))
                for latency in latencies
            ],
            axis=0,
        )
        at = np.unravel_index(int(np.argmin(worst)), worst.shape)
        best = np.array([each[at] for each in points])
        reach = (high - low) * 0.4
        low, high = np.maximum(best - reach, 1e-9), best + reach
    return tuple(map(float, best))


def left_out_errors(num_constants: int) -> list[float]:
    """Return the relative error of each figure's prediction from the other seven."""
    return [
        left_out.closed_form_ms(
            *fit(tuple(each for each in LATENCIES if each is not left_out), num_constants)
        )
        / left_out.published_ms
        - 1.0
        for left_out in LATENCIES
    ]


def _of_third() -> list[Row]:
    """Return rows of two constants and of three: the largest error, errors of figures left out, the ninth figure."""
    rows = []
    for num_constants, name in ((2, "two constants"), (3, "with a rate across boards")):
        constants = fit(LATENCIES, num_constants)
        worst = max(
            abs(each.closed_form_ms(*constants) / each.published_ms - 1.0) for each in LATENCIES
        )
        unseen = left_out_errors(num_constants)
        start_ms = 1e3 * 62 * 62 * constants[0]
        for what, ours, peer, unit in (
            ("largest error", 100 * worst, 10.0, "%"),
            ("largest error of a figure left out", 100 * max(map(abs, unseen)), 10.0, "%"),
            (
                "root mean square of those",
                100 * float(np.sqrt(np.mean(np.square(unseen)))),
                10.0,
                "%",
            ),
            ("start of ResNet-18's transfers, ring, 32 SoCs", start_ms, 1300.0, "ms"),
        ):
            rows.append(
                less_is_better(
                    f"{name}: {what}",
                    ours,
                    PEER if unit == "ms" else "the aim",
                    peer,
                    unit,
                    ok=True,
                )
            )
    return rows


def run(quick: bool = False) -> list[Row]:
    """Return the eight latencies as simulated, then as predicted from the other seven, then the constants."""
    rows = [
        _row(latency.case, latency.simulated_ms(), latency.published_ms) for latency in LATENCIES
    ]
    for left_out in LATENCIES:
        constants = fit(tuple(latency for latency in LATENCIES if latency is not left_out))
        rows.append(
            _row(
                f"{left_out.case}, predicted from the other seven",
                float(left_out.closed_form_ms(*constants)),
                left_out.published_ms,
                tolerance=UNSEEN_TOLERANCE,
            )
        )
    per_message_s, bytes_per_s = fit(LATENCIES)
    for case, value, fitted, unit in (
        ("cost of a message", message_s(), per_message_s, "s"),
        ("rate of a link", link_bytes_per_s(), bytes_per_s, "bytes/s"),
    ):
        rows.append(
            more_is_better(
                f"{case} in the catalogue",
                value,
                "fitted to the eight here",
                fitted,
                unit,
                ok=abs(value / fitted - 1.0) < 0.01,
            )
        )
    return rows + _of_third()


def _row(case: str, ours_ms: float, published_ms: float, tolerance: float = TOLERANCE) -> Row:
    error = ours_ms / published_ms - 1.0
    # A prediction is neither better nor worse than a measurement; the ratio only shows the error.
    return less_is_better(
        f"{case} ({error:+.1%})", ours_ms, PEER, published_ms, "ms", ok=abs(error) <= tolerance
    )
