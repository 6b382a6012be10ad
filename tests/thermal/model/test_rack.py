"""A rack's network: what its shape implies, whatever the loads."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.model.rack import Rack

SLOTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
FEW = settings(max_examples=40)


@st.composite
def loaded(draw: st.DrawFn) -> tuple[Rack, list[float], float]:
    """A rack, watts of its SoCs, and what the fans carry away."""
    rack = Rack(slots_per_board=draw(SLOTS))
    watts = draw(st.lists(st.floats(0.0, 12.0), min_size=rack.num_socs, max_size=rack.num_socs))
    return rack, watts, draw(st.floats(5.0, 60.0))


@FEW
@given(case=loaded())
def test_at_rest_each_part_is_warmer_by_what_flows_over_its_conductances(
    case,
):
    """Air above ambient by all watts, a board above the air by its SoCs' watts, a SoC above its board by its own."""
    rack, watts, chassis_w_per_k = case
    steady_c = rack.network(chassis_w_per_k).steady_c(rack.node_power_w(watts), 25.0)
    air_c = 25.0 + sum(watts) / chassis_w_per_k
    assert steady_c[-1] == pytest.approx(air_c)
    soc = 0
    for board, slots in enumerate(rack.slots_per_board):
        board_c = air_c + sum(watts[soc : soc + slots]) / rack.board_to_air_w_per_k
        assert steady_c[rack.num_socs + board] == pytest.approx(board_c)
        for _ in range(slots):
            assert steady_c[soc] == pytest.approx(board_c + watts[soc] / rack.soc_to_board_w_per_k)
            soc += 1


@FEW
@given(slots=SLOTS, watts=st.floats(0.0, 12.0), chassis_w_per_k=st.floats(5.0, 60.0))
def test_the_local_rise_is_how_much_warmer_than_the_air_an_equally_busy_board_settles(
    slots,
    watts,
    chassis_w_per_k,
):
    rack = Rack(slots_per_board=slots)
    steady_c = rack.network(chassis_w_per_k).steady_c(
        rack.node_power_w([watts] * rack.num_socs), 25.0
    )
    assert steady_c[0] - steady_c[-1] == pytest.approx(rack.local_rise_c(watts, slots[0]), abs=1e-9)


@FEW
@given(
    case=loaded(),
    more=st.floats(0.0, 40.0),
    start_c=st.floats(26.0, 60.0),
    duration_s=st.floats(0.0, 3000.0),
)
def test_more_fan_never_makes_anything_hotter(
    case,
    more,
    start_c,
    duration_s,
):
    rack, watts, chassis_w_per_k = case
    power_w, start = np.array(rack.node_power_w(watts)), np.full(rack.num_nodes, start_c)
    slow = rack.network(chassis_w_per_k)
    fast = rack.network(chassis_w_per_k + more)
    assert (
        fast.pass_time(start, power_w, 25.0, duration_s).temperatures_c
        <= slow.pass_time(start, power_w, 25.0, duration_s).temperatures_c + 1e-9
    ).all()
    assert (fast.steady_c(power_w, 25.0) <= slow.steady_c(power_w, 25.0) + 1e-9).all()


@FEW
@given(
    case=loaded(),
    part=st.floats(0.05, 1.0),
    place=st.integers(0, 100),
    duration_s=st.floats(1.0, 3000.0),
)
def test_bad_airflow_heats_its_own_board_and_a_badly_seated_soc_itself(
    case,
    part,
    place,
    duration_s,
):
    """Heat still has to leave by the chassis: at rest the air is as warm as before, and nobody else notices."""
    rack, watts, chassis_w_per_k = case
    power_w = rack.node_power_w(watts)
    before_c = rack.network(chassis_w_per_k).steady_c(power_w, 25.0)
    board, soc = place % len(rack.slots_per_board), place % rack.num_socs

    own = {rack.num_socs + board} | set(
        range(sum(rack.slots_per_board[:board]), sum(rack.slots_per_board[: board + 1]))
    )
    blocked_c = (
        replace(rack, airflow={board: part}).network(chassis_w_per_k).steady_c(power_w, 25.0)
    )
    own_w = sum(power_w[node] for node in own)
    for node in range(rack.num_nodes):
        warmer_c = own_w / rack.board_to_air_w_per_k * (1.0 / part - 1.0) if node in own else 0.0
        assert blocked_c[node] - before_c[node] == pytest.approx(warmer_c, rel=1e-6, abs=1e-7)

    seated_c = replace(rack, coupling={soc: part}).network(chassis_w_per_k).steady_c(power_w, 25.0)
    for node in range(rack.num_nodes):
        warmer_c = (
            power_w[soc] / rack.soc_to_board_w_per_k * (1.0 / part - 1.0) if node == soc else 0.0
        )
        assert seated_c[node] - before_c[node] == pytest.approx(warmer_c, rel=1e-6, abs=1e-7)


@FEW
@given(slots=SLOTS)
def test_the_nodes_hold_the_heat_of_their_parts(slots):
    rack = Rack(slots_per_board=slots)
    warm = np.full(rack.num_nodes, 26.0)
    assert rack.num_nodes == rack.num_socs + len(slots) + 1
    assert rack.network(10.0).heat_j(warm, 25.0) == pytest.approx(
        rack.num_socs * rack.soc_j_per_k + len(slots) * rack.board_j_per_k + rack.chassis_j_per_k
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"slots_per_board": ()}, "at least one slot"),
        ({"slots_per_board": (5, 0)}, "at least one slot"),
        ({"airflow": {2: 0.5}}, "airflow of 2, but there are 0 to 1"),
        ({"airflow": {-1: 0.5}}, "airflow of -1"),
        ({"airflow": {0: 0.0}}, "airflow of 0 = 0.0 must be above 0"),
        ({"airflow": {0: math.nan}}, "must be above 0"),
        ({"airflow": {0: math.inf}}, "must be above 0"),
        ({"coupling": {10: 0.5}}, "coupling of 10, but there are 0 to 9"),
        ({"coupling": {3: -1.0}}, "coupling of 3 = -1.0 must be above 0"),
    ],
)
def test_racks_that_cannot_be_are_refused_in_one_line(arguments, text):
    with pytest.raises(ConfigError, match=text) as error:
        Rack(**{"slots_per_board": (5, 5), **arguments})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("watts", [[], [1.0], [1.0] * 11])
def test_powers_are_one_for_each_soc(watts):
    with pytest.raises(ConfigError, match=f"{len(watts)} powers for 10 SoCs"):
        Rack(slots_per_board=(5, 5)).node_power_w(watts)
