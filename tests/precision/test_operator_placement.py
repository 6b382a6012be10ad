"""F17: the placement of least latency, against every possible placement."""

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import ConfigError, InfeasiblePlan
from socflower.precision.operator_placement import SIDES, OperatorLatency, place

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


def cost(latencies: list[OperatorLatency], sides: tuple[str, ...], switch_s: float) -> float:
    work = sum(latency.on(side) for latency, side in zip(latencies, sides, strict=True))
    return work + switch_s * sum(a != b for a, b in pairwise(sides))


@given(LATENCIES, st.integers(0, 15))
def test_no_placement_is_quicker(pairs: list[tuple[float, float]], switch_s: int) -> None:
    latencies = operators(pairs)
    placed = place(latencies, switch_s)
    best = min(cost(latencies, sides, switch_s) for sides in product(SIDES, repeat=len(latencies)))
    assert placed.latency_s == best
    assert cost(latencies, placed.sides, switch_s) == best


@given(LATENCIES, st.integers(0, 15))
def test_what_the_npu_lacks_runs_on_the_cpu(
    pairs: list[tuple[float, float]], switch_s: int
) -> None:
    placed = place(operators(pairs), switch_s)
    for (_, npu_s), side in zip(pairs, placed.sides, strict=True):
        assert side == "cpu" or not math.isinf(npu_s)


@given(LATENCIES, st.data())
def test_no_placement_is_quicker_where_switches_differ(
    pairs: list[tuple[float, float]], data: st.DataObject
) -> None:
    latencies = operators(pairs)
    gaps = len(latencies) - 1
    switches = [
        float(gap) for gap in data.draw(st.lists(st.integers(0, 15), min_size=gaps, max_size=gaps))
    ]

    def total(sides: tuple[str, ...]) -> float:
        crossed = sum(gap for gap, (a, b) in zip(switches, pairwise(sides), strict=True) if a != b)
        return cost(latencies, sides, 0.0) + crossed

    placed = place(latencies, switches)
    best = min(total(sides) for sides in product(SIDES, repeat=len(latencies)))
    assert placed.latency_s == total(placed.sides) == best


def test_costly_switches_keep_an_operator_beside_its_neighbours() -> None:
    pairs = [
        (9, 1),
        (1, 2),
        (9, 1),
    ]  # the middle one is quicker on the CPU, by less than two switches
    assert place(operators(pairs), 5).sides == ("npu", "npu", "npu")
    assert place(operators(pairs), 0.1).sides == ("npu", "cpu", "npu")


def test_the_path_names_runs_of_operators() -> None:
    placed = place(operators([(9, 1), (9, 1), (1, math.inf), (9, 1)]), 2)
    assert placed.path() == "npu[op0..op1] -> cpu[op2] -> npu[op3]"
    assert placed.num_switches == 2
    assert placed.on_cpu == ("op2",)


def test_equal_latencies_go_to_the_npu() -> None:
    assert place(operators([(3, 3), (4, 4)]), 0).sides == ("npu", "npu")


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(InfeasiblePlan, match="op1: neither the CPU nor the NPU"):
        place(operators([(1, 1), (math.inf, math.inf)]), 1)
    with pytest.raises(ConfigError, match="switch_s must be 0 or more, got -1"):
        place(operators([(1, 1)]), -1)
    with pytest.raises(ConfigError, match="need 1 switches between 2 operators, got 3"):
        place(operators([(1, 1), (1, 1)]), [1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match="no operators"):
        place([], 1)
    with pytest.raises(ConfigError, match="op: latencies must be 0 or more"):
        OperatorLatency(name="op", cpu_s=math.nan, npu_s=1.0)
