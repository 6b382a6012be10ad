"""A rack's network: what its shape implies, at any load."""

from dataclasses import replace
from functools import partial
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.model.rack import Rack
from tests.one_line import refused

SLOTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
FANS_W_PER_K = st.floats(5.0, 60.0)
FEW = settings(max_examples=40)


@st.composite
def loaded(draw: st.DrawFn) -> tuple[Rack, list[float]]:
    """Return a rack and the watts of its SoCs."""
    rack = Rack(slots_per_board=draw(SLOTS))
    watts = st.lists(st.floats(0.0, 12.0), min_size=rack.num_socs, max_size=rack.num_socs)
    return rack, draw(watts)


def steady_c(rack: Rack, watts: list[float], fans_w_per_k: float) -> np.ndarray:
    return rack.network(fans_w_per_k).steady_c(rack.node_power_w(watts), 25.0)


def boards_of(rack: Rack) -> list[int]:
    return [board for board, slots in enumerate(rack.slots_per_board) for _ in range(slots)]


@FEW
@given(case=loaded(), fans_w_per_k=FANS_W_PER_K)
def test_at_rest_each_part_is_warmer_by_what_flows_over_its_conductances(case, fans_w_per_k):
    """Air above ambient by all watts, a board above the air by its SoCs' watts, a SoC above its board by its own."""
    rack, watts = case
    found_c = steady_c(rack, watts, fans_w_per_k)
    air_c = 25.0 + sum(watts) / fans_w_per_k
    boards = boards_of(rack)
    board_w = np.bincount(boards, watts)
    board_c = air_c + board_w / rack.board_to_air_w_per_k
    soc_c = board_c[boards] + np.array(watts) / rack.soc_to_board_w_per_k
    assert found_c == pytest.approx([*soc_c, *board_c, air_c])


@FEW
@given(slots=SLOTS, watts=st.floats(0.0, 12.0), fans_w_per_k=FANS_W_PER_K)
def test_the_local_rise_is_that_of_an_equally_busy_board_above_the_air(slots, watts, fans_w_per_k):
    rack = Rack(slots_per_board=slots)
    found_c = steady_c(rack, [watts] * rack.num_socs, fans_w_per_k)
    assert found_c[0] - found_c[-1] == pytest.approx(rack.local_rise_c(watts, slots[0]), abs=1e-9)


@FEW
@given(
    case=loaded(),
    fans_w_per_k=FANS_W_PER_K,
    more=st.floats(0.0, 40.0),
    start_c=st.floats(26.0, 60.0),
    duration_s=st.floats(0.0, 3000.0),
)
def test_more_fan_never_makes_anything_hotter(case, fans_w_per_k, more, start_c, duration_s):
    rack, watts = case
    power_w, start = np.array(rack.node_power_w(watts)), np.full(rack.num_nodes, start_c)
    slow, fast = rack.network(fans_w_per_k), rack.network(fans_w_per_k + more)
    hotter_c = fast.end_c(start, power_w, 25.0, duration_s) - slow.end_c(
        start, power_w, 25.0, duration_s
    )
    assert hotter_c.max() <= 1e-9
    assert (fast.steady_c(power_w, 25.0) - slow.steady_c(power_w, 25.0)).max() <= 1e-9


@FEW
@given(
    case=loaded(),
    fans_w_per_k=FANS_W_PER_K,
    part=st.floats(0.05, 1.0),
    place=st.integers(0, 100),
)
def test_bad_airflow_heats_its_own_board_and_a_badly_seated_soc_itself(
    case, fans_w_per_k, part, place
):
    """Heat still leaves by the chassis: at rest the air is as warm as before, and so are all other parts."""
    rack, watts = case
    before_c = steady_c(rack, watts, fans_w_per_k)
    soc = place % rack.num_socs
    boards = np.array(boards_of(rack))
    own = boards == boards[soc]
    worse = 1.0 / part - 1.0

    blocked = replace(rack, airflow={boards[soc]: part})
    expected_c = before_c.copy()
    own_nodes = np.append(np.flatnonzero(own), rack.num_socs + boards[soc])
    expected_c[own_nodes] += np.array(watts)[own].sum() / rack.board_to_air_w_per_k * worse
    found_c = steady_c(blocked, watts, fans_w_per_k)
    assert found_c == pytest.approx(expected_c, rel=1e-6, abs=1e-7)

    seated = replace(rack, coupling={soc: part})
    before_c[soc] += watts[soc] / rack.soc_to_board_w_per_k * worse
    found_c = steady_c(seated, watts, fans_w_per_k)
    assert found_c == pytest.approx(before_c, rel=1e-6, abs=1e-7)


@FEW
@given(slots=SLOTS)
def test_the_nodes_have_the_heat_capacities_of_their_parts(slots):
    rack = Rack(slots_per_board=slots)
    parts = [rack.soc_j_per_k] * sum(slots) + [rack.board_j_per_k] * len(slots)
    assert rack.network(10.0).capacities_j_per_k == (*parts, rack.chassis_j_per_k)
    assert rack.num_nodes == len(parts) + 1


def test_invalid_racks_and_powers_are_refused():
    make = partial(Rack, slots_per_board=(5, 5))
    for slots in ((), (5, 0)):
        refused(partial(make, slots_per_board=slots), "slot")
    for key, index, part in (
        ("airflow", 2, 0.5),
        ("airflow", -1, 0.5),
        ("airflow", 0, 0.0),
        ("airflow", 0, nan),
        ("airflow", 0, inf),
        ("coupling", 10, 0.5),
        ("coupling", 3, -1.0),
    ):
        refused(partial(make, **{key: {index: part}}), key, index)
    for far in (5e-324, 1e-14, 1e14, 1e300):
        for key in ("airflow", "coupling"):
            refused(partial(make(**{key: {0: far}}).network, 100.0), key)
    for watts in ([], [1.0], [1.0] * 11):
        refused(partial(make().node_power_w, watts), len(watts), 10)
