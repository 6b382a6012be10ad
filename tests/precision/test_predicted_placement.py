"""F17: the placement of least latency, against every possible placement."""

import math
from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import InfeasiblePlan
from socflower.precision.predicted_placement import SIDES, OperatorLatency, place
from tests.one_line import refused

LATENCIES = st.lists(
    st.tuples(st.integers(0, 20), st.one_of(st.integers(0, 20), st.just(math.inf))),
    min_size=1,
    max_size=8,
)


def operators(pairs: list[tuple[float, float]]) -> list[OperatorLatency]:
    return [
        OperatorLatency(name=f"op{i}", cpu_s=float(cpu), npu_s=float(npu))
        for i, (cpu, npu) in enumerate(pairs)
    ]


def cost(latencies: list[OperatorLatency], sides: tuple[str, ...], switches: list[float]) -> float:
    work = sum(latency.on(side) for latency, side in zip(latencies, sides, strict=True))
    crossed = zip(switches, pairwise(sides), strict=True)
    return work + sum(switch for switch, (a, b) in crossed if a != b)


@given(LATENCIES, st.data())
def test_no_placement_is_quicker_and_what_the_npu_lacks_runs_on_the_cpu(
    pairs: list[tuple[float, float]], data: st.DataObject
) -> None:
    """Against all of them."""
    latencies = operators(pairs)
    gaps = len(pairs) - 1
    switches = data.draw(st.lists(st.integers(0, 15), min_size=gaps, max_size=gaps))
    placed = place(latencies, switches)
    best = min(cost(latencies, sides, switches) for sides in product(SIDES, repeat=len(latencies)))
    assert placed.latency_s == cost(latencies, placed.sides, switches) == best
    for (_, npu_s), side in zip(pairs, placed.sides, strict=True):
        assert side == "cpu" or not math.isinf(npu_s)


def test_the_path_names_runs_of_operators() -> None:
    placed = place(operators([(9, 1), (9, 1), (1, math.inf), (9, 1)]), [2, 2, 2])
    assert placed.path() == "npu[op0..op1] -> cpu[op2] -> npu[op3]"
    assert placed.on_cpu == ("op2",)


def test_equal_latencies_go_to_the_npu() -> None:
    assert place(operators([(3, 3), (4, 4)]), [0]).sides == ("npu", "npu")


def test_an_operator_that_no_side_has_is_refused() -> None:
    nowhere = operators([(1, 1), (math.inf, math.inf)])
    refused(lambda: place(nowhere, [1]), "op1", error=InfeasiblePlan)
