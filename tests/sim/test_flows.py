"""Max-min fairness: its certificate, and brute force on small cases."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.sim.flows import max_min_rates

CAPACITIES = st.lists(st.floats(0.1, 1e9), min_size=1, max_size=6)


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], dict[int, float]]:
    capacities = dict(enumerate(draw(CAPACITIES)))
    path = st.lists(st.sampled_from(sorted(capacities)), min_size=1, max_size=4, unique=True).map(
        tuple
    )
    return draw(st.lists(path, max_size=12)), capacities


@given(networks())
def test_max_min_certificate(network: tuple[list[tuple[int, ...]], dict[int, float]]) -> None:
    paths, capacities = network
    rates = max_min_rates(paths, capacities)
    used = {
        link: sum(rate for rate, path in zip(rates, paths, strict=True) if link in path)
        for link in capacities
    }
    assert all(used[link] <= capacities[link] * (1 + 1e-9) for link in capacities)
    for rate, path in zip(rates, paths, strict=True):
        assert any(
            used[link] >= capacities[link] * (1 - 1e-9)
            and all(
                rate >= other * (1 - 1e-9)
                for other, crossed in zip(rates, paths, strict=True)
                if link in crossed
            )
            for link in path
        ), "a flow has no bottleneck"


@given(networks(), st.randoms(use_true_random=False))
def test_order_of_flows_does_not_matter(
    network: tuple[list[tuple[int, ...]], dict[int, float]], random: object
) -> None:
    paths, capacities = network
    order = list(range(len(paths)))
    random.shuffle(order)
    rates = max_min_rates(paths, capacities)
    assert max_min_rates([paths[flow] for flow in order], capacities) == pytest.approx(
        [rates[flow] for flow in order], rel=1e-9
    )


@given(st.integers(1, 50), st.floats(0.1, 1e9))
def test_single_link_is_shared_equally(num_flows: int, capacity: float) -> None:
    rates = max_min_rates([("link",)] * num_flows, {"link": capacity})
    assert len(set(rates)) == 1
    assert sum(rates) == pytest.approx(capacity)


@given(
    st.integers(1, 3).flatmap(
        lambda n: st.tuples(
            st.lists(st.sets(st.integers(0, 2), min_size=1).map(tuple), min_size=n, max_size=n),
            st.tuples(*[st.integers(1, 6)] * 3),
        )
    )
)
def test_no_grid_allocation_is_lexicographically_fairer(
    case: tuple[list[tuple[int, ...]], tuple[int, ...]],
) -> None:
    paths, sizes = case
    best = sorted(max_min_rates(paths, dict(enumerate(map(float, sizes)))))
    for rates in product([step / 2 for step in range(13)], repeat=len(paths)):
        used = [
            sum(rate for rate, path in zip(rates, paths, strict=True) if link in path)
            for link in range(3)
        ]
        if all(use <= size for use, size in zip(used, sizes, strict=True)):
            rounded = [round(rate, 9) for rate in sorted(rates)]
            assert rounded <= [round(rate, 9) for rate in best]


def test_textbook_case() -> None:
    # One long flow over both links, one short flow on each: the narrow link gives 1 each, the wide one the rest.
    assert max_min_rates([("a", "b"), ("a",), ("b",)], {"a": 2.0, "b": 10.0}) == [1.0, 1.0, 9.0]
    assert max_min_rates([], {"a": 1.0}) == []
