"""The RC network against small steps of its own equation, and what any such network obeys."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.errors import ConfigError
from socflower.thermal.model.rack import ThermalNetwork, Vector

CONDUCTANCES = st.floats(0.1, 50.0)
AMBIENT_C = st.floats(-20.0, 45.0)
SECONDS = st.floats(0.0, 5000.0)
FEW = settings(max_examples=40)


@st.composite
def networks(draw: st.DrawFn) -> ThermalNetwork:
    """Any connected network of up to seven nodes: a random tree, more edges, one way to the air or several."""
    size = draw(st.integers(1, 7))
    edges = [(draw(st.integers(0, node - 1)), node, draw(CONDUCTANCES)) for node in range(1, size)]
    if size > 1:
        for _ in range(draw(st.integers(0, 4))):
            left, right = draw(st.permutations(range(size)))[:2]
            edges.append((left, right, draw(CONDUCTANCES)))
    to_air = draw(
        st.lists(st.one_of(st.just(0.0), CONDUCTANCES), min_size=size, max_size=size).filter(any)
    )
    return ThermalNetwork(
        capacities_j_per_k=tuple(
            draw(st.lists(st.floats(1.0, 5000.0), min_size=size, max_size=size))
        ),
        edges=tuple(edges),
        ambient_w_per_k=tuple(to_air),
    )


@st.composite
def loaded(draw: st.DrawFn, coldest_w: float = 0.0) -> tuple[ThermalNetwork, Vector, Vector]:
    """A network, temperatures and powers of its nodes."""
    network = draw(networks())
    size = len(network.capacities_j_per_k)
    start_c = draw(st.lists(st.floats(-20.0, 100.0), min_size=size, max_size=size))
    power_w = draw(st.lists(st.floats(coldest_w, 200.0), min_size=size, max_size=size))
    return network, np.array(start_c), np.array(power_w)


def slopes(
    network: ThermalNetwork, temperatures_c: Vector, power_w: Vector, ambient_c: float
) -> Vector:
    """dT/dt by the law of each edge, written out."""
    heat_w = list(power_w)
    for node, conductance in enumerate(network.ambient_w_per_k):
        heat_w[node] -= conductance * (temperatures_c[node] - ambient_c)
    for left, right, conductance in network.edges:
        flow_w = conductance * (temperatures_c[left] - temperatures_c[right])
        heat_w[left] -= flow_w
        heat_w[right] += flow_w
    return np.array(heat_w) / np.array(network.capacities_j_per_k)


def fastest_per_s(network: ThermalNetwork) -> float:
    """A bound of the fastest rate (Gershgorin)."""
    sums = list(network.ambient_w_per_k)
    for left, right, conductance in network.edges:
        sums[left] += 2.0 * conductance
        sums[right] += 2.0 * conductance
    return max(
        one / capacity for one, capacity in zip(sums, network.capacities_j_per_k, strict=True)
    )


@FEW
@given(
    case=loaded(), ambient_c=AMBIENT_C, steps=st.integers(1, 150), stiffness=st.floats(0.01, 0.3)
)
def test_exact_integration_equals_small_steps_of_runge_and_kutta(
    case,
    ambient_c,
    steps,
    stiffness,
):
    network, start_c, power_w = case
    step_s = stiffness / fastest_per_s(network)
    now_c, mean_c = start_c, np.zeros_like(start_c)
    for _ in range(steps):
        k1 = slopes(network, now_c, power_w, ambient_c)
        k2 = slopes(network, now_c + 0.5 * step_s * k1, power_w, ambient_c)
        k3 = slopes(network, now_c + 0.5 * step_s * k2, power_w, ambient_c)
        k4 = slopes(network, now_c + step_s * k3, power_w, ambient_c)
        # Simpson's rule over the step, with the step's own middle.
        middle_c = now_c + step_s * (5.0 * k1 + 4.0 * k2 + 4.0 * k3 - k4) / 24.0
        then_c = now_c + step_s * (k1 + 2.0 * k2 + 2.0 * k3 + k4) / 6.0
        mean_c = mean_c + (now_c + 4.0 * middle_c + then_c) / (6.0 * steps)
        now_c = then_c
    passage = network.pass_time(start_c, power_w, ambient_c, steps * step_s)
    # Each step is wrong by about (rate step)^5 / 120 of the way that is left, its Simpson mean by (rate step)^4 / 100.
    way_c = float(np.abs(start_c - network.steady_c(power_w, ambient_c)).max())
    assert passage.temperatures_c == pytest.approx(now_c, abs=0.1 * stiffness**4 * way_c + 1e-7)
    assert passage.mean_c == pytest.approx(mean_c, abs=0.1 * stiffness**4 * way_c + 1e-7)


@FEW
@given(
    case=loaded(),
    ambient_c=AMBIENT_C,
    times_s=st.lists(SECONDS, min_size=1, max_size=6),
    below_c=st.floats(0.0, 60.0),
)
def test_temperature_never_overshoots_its_steady_state_when_it_starts_below_it(
    case,
    ambient_c,
    times_s,
    below_c,
):
    network, start_c, power_w = case
    steady_c = network.steady_c(power_w, ambient_c)
    start_c = np.minimum(start_c, steady_c - below_c)
    for time_s in times_s:
        passage = network.pass_time(start_c, power_w, ambient_c, time_s)
        assert (passage.temperatures_c <= steady_c + 1e-7).all()
        assert (passage.mean_c <= steady_c + 1e-7).all()


@FEW
@given(case=loaded(), ambient_c=AMBIENT_C, first_s=SECONDS, then_s=SECONDS)
def test_from_the_ambient_temperature_it_only_rises(
    case,
    ambient_c,
    first_s,
    then_s,
):
    network, start_c, power_w = case
    start_c = np.full_like(start_c, ambient_c)
    middle_c = network.pass_time(start_c, power_w, ambient_c, first_s).temperatures_c
    assert (middle_c >= start_c - 1e-7).all()
    assert (
        network.pass_time(middle_c, power_w, ambient_c, then_s).temperatures_c >= middle_c - 1e-7
    ).all()


@FEW
@given(case=loaded(coldest_w=-50.0), ambient_c=AMBIENT_C, duration_s=SECONDS)
def test_the_energy_balance_closes(
    case,
    ambient_c,
    duration_s,
):
    """Heat in = heat stored + heat out, to 1e-9 of the largest of what comes in, goes out and is there."""
    network, start_c, power_w = case
    passage = network.pass_time(start_c, power_w, ambient_c, duration_s)
    in_j = float(power_w.sum()) * duration_s
    stored_j = network.heat_j(passage.temperatures_c, ambient_c) - network.heat_j(
        start_c, ambient_c
    )
    scale_j = (
        float(np.abs(power_w).sum()) * duration_s
        + abs(passage.heat_out_j)
        + float(
            np.dot(
                network.capacities_j_per_k,
                np.abs(start_c) + np.abs(passage.temperatures_c) + abs(ambient_c),
            )
        )
    )
    assert in_j - stored_j - passage.heat_out_j == pytest.approx(0.0, abs=1e-9 * scale_j + 1e-9)


@FEW
@given(
    case=loaded(),
    ambient_c=AMBIENT_C,
    parts_s=st.lists(st.floats(0.0, 800.0), min_size=1, max_size=8),
)
def test_any_splitting_of_the_time_gives_the_same_end_and_the_same_heat(
    case,
    ambient_c,
    parts_s,
):
    network, start_c, power_w = case
    whole = network.pass_time(start_c, power_w, ambient_c, math.fsum(parts_s))
    now_c, out_j, weighted_c = start_c, 0.0, np.zeros_like(start_c)
    for part_s in parts_s:
        passage = network.pass_time(now_c, power_w, ambient_c, part_s)
        now_c, out_j = passage.temperatures_c, out_j + passage.heat_out_j
        weighted_c = weighted_c + passage.mean_c * part_s
    assert now_c == pytest.approx(whole.temperatures_c, rel=1e-9, abs=1e-7)
    scale_j = float(np.dot(network.capacities_j_per_k, np.abs(start_c))) + float(
        power_w.sum()
    ) * math.fsum(parts_s)
    assert out_j == pytest.approx(whole.heat_out_j, rel=1e-8, abs=1e-9 * scale_j + 1e-9)
    assert weighted_c == pytest.approx(whole.mean_c * math.fsum(parts_s), rel=1e-8, abs=1e-6)


@FEW
@given(case=loaded(), ambient_c=AMBIENT_C)
def test_the_steady_state_is_the_limit_of_time_and_stays(
    case,
    ambient_c,
):
    network, start_c, power_w = case
    steady_c = network.steady_c(power_w, ambient_c)
    late_c = network.pass_time(start_c, power_w, ambient_c, 60.0 * network.slowest_s).temperatures_c
    assert late_c == pytest.approx(steady_c, rel=1e-7, abs=1e-6)
    stays = network.pass_time(steady_c, power_w, ambient_c, 1000.0)
    assert stays.temperatures_c == pytest.approx(steady_c, rel=1e-7, abs=1e-6)
    assert stays.heat_out_j == pytest.approx(1000.0 * float(power_w.sum()), rel=1e-6, abs=1e-3)


@FEW
@given(case=loaded(), ambient_c=AMBIENT_C, duration_s=SECONDS, warmer_c=st.floats(0.0, 30.0))
def test_a_hotter_room_and_a_hotter_start_shift_everything(
    case,
    ambient_c,
    duration_s,
    warmer_c,
):
    network, start_c, power_w = case
    cool = network.pass_time(start_c, power_w, ambient_c, duration_s)
    hot = network.pass_time(start_c + warmer_c, power_w, ambient_c + warmer_c, duration_s)
    assert hot.temperatures_c == pytest.approx(cool.temperatures_c + warmer_c, abs=1e-6)
    assert hot.heat_out_j == pytest.approx(cool.heat_out_j, rel=1e-7, abs=1e-3)
    # A hotter room alone warms every node, by no more than the room got hotter.
    room = network.pass_time(start_c, power_w, ambient_c + warmer_c, duration_s).temperatures_c
    assert (room >= cool.temperatures_c - 1e-7).all() and (
        room <= cool.temperatures_c + warmer_c + 1e-7
    ).all()


@FEW
@given(
    case=loaded(),
    other=st.lists(st.floats(0.0, 50.0), min_size=7, max_size=7),
    ambient_c=AMBIENT_C,
    duration_s=SECONDS,
)
def test_more_power_anywhere_makes_nothing_cooler(
    case,
    other,
    ambient_c,
    duration_s,
):
    network, start_c, power_w = case
    more_w = power_w + np.array(other[: len(power_w)])
    less = network.pass_time(start_c, power_w, ambient_c, duration_s)
    more = network.pass_time(start_c, more_w, ambient_c, duration_s)
    assert (more.temperatures_c >= less.temperatures_c - 1e-7).all()
    assert (
        network.steady_c(more_w, ambient_c) >= network.steady_c(power_w, ambient_c) - 1e-7
    ).all()


@FEW
@given(case=loaded(), ambient_c=AMBIENT_C)
def test_no_time_changes_nothing(case, ambient_c):
    network, start_c, power_w = case
    passage = network.pass_time(start_c, power_w, ambient_c, 0.0)
    assert passage.temperatures_c == pytest.approx(start_c, abs=1e-8)
    assert passage.mean_c == pytest.approx(start_c, abs=1e-8)
    assert passage.heat_out_j == 0.0


def test_one_node_by_hand():
    """100 J/K and 2 W/K: 50 s to 1/e; 20 W hold it 10 K above the air."""
    node = ThermalNetwork(capacities_j_per_k=(100.0,), edges=(), ambient_w_per_k=(2.0,))
    assert node.slowest_s == pytest.approx(50.0)
    passage = node.pass_time(np.array([25.0]), np.array([20.0]), 25.0, 50.0)
    assert passage.temperatures_c == pytest.approx([25.0 + 10.0 * (1.0 - math.exp(-1.0))])
    # In: 1,000 J; stored: 632.1 J.
    assert passage.heat_out_j == pytest.approx(1000.0 - 1000.0 * (1.0 - math.exp(-1.0)))
    assert node.heat_j(passage.temperatures_c, 25.0) == pytest.approx(
        1000.0 * (1.0 - math.exp(-1.0))
    )


@pytest.mark.parametrize(
    ("capacities", "edges", "to_air", "text"),
    [
        ((), (), (), "must be above 0"),
        ((1.0, 0.0), ((0, 1, 1.0),), (1.0, 1.0), "must be above 0"),
        ((math.inf,), (), (1.0,), "above 0 and finite"),
        ((math.nan,), (), (1.0,), "above 0 and finite"),
        ((1.0,), (), (1.0, 1.0), "need 1 conductances"),
        ((1.0,), (), (-1.0,), "none negative"),
        ((1.0,), (), (math.nan,), "none negative"),
        ((1.0, 1.0), ((0, 2, 1.0),), (1.0, 1.0), "needs two of the 2 nodes"),
        ((1.0, 1.0), ((1, 1, 1.0),), (1.0, 1.0), "needs two of the 2 nodes"),
        ((1.0, 1.0), ((0, 1, 0.0),), (1.0, 1.0), "a conductance above 0"),
        ((1.0, 1.0), ((0, 1, math.nan),), (1.0, 1.0), "a conductance above 0"),
        ((1.0,), (), (0.0,), "no way to the ambient air"),
        ((1.0, 1.0, 1.0), ((0, 1, 1.0),), (1.0, 0.0, 0.0), "no way to the ambient air"),
    ],
)
def test_networks_that_cannot_be_are_refused_in_one_line(
    capacities,
    edges,
    to_air,
    text,
):
    with pytest.raises(ConfigError, match=text) as error:
        ThermalNetwork(capacities_j_per_k=capacities, edges=edges, ambient_w_per_k=to_air)
    assert "\n" not in str(error.value)
