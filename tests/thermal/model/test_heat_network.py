"""The RC network against small steps of its own equation, and what any such network obeys."""

from functools import partial
from math import exp, fsum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.model.rack import ThermalNetwork, Vector

CONDUCTANCES = st.floats(0.1, 50.0)
AMBIENT_C = st.floats(-20.0, 45.0)
SECONDS = st.floats(0.0, 5000.0)
FEW = settings(max_examples=40)
Case = tuple[ThermalNetwork, Vector, Vector, float]


def vectors(low: float, high: float, size: int) -> st.SearchStrategy[Vector]:
    return st.lists(st.floats(low, high), min_size=size, max_size=size).map(np.array)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return any connected network of up to seven nodes, temperatures and powers of its nodes, and ambient °C.

    It is a random tree with more edges, and one way to the air or several.
    """
    size = draw(st.integers(1, 7))
    edges = [(draw(st.integers(0, node - 1)), node, draw(CONDUCTANCES)) for node in range(1, size)]
    for _ in range(draw(st.integers(0, 4)) if size > 1 else 0):
        left, right = draw(st.permutations(range(size)))[:2]
        edges.append((left, right, draw(CONDUCTANCES)))
    to_air = st.lists(st.just(0.0) | CONDUCTANCES, min_size=size, max_size=size).filter(any)
    network = ThermalNetwork(
        capacities_j_per_k=tuple(draw(vectors(1.0, 5000.0, size))),
        edges=tuple(edges),
        ambient_w_per_k=tuple(draw(to_air)),
    )
    start_c, power_w = draw(vectors(-20.0, 100.0, size)), draw(vectors(0.0, 200.0, size))
    return network, start_c, power_w, draw(AMBIENT_C)


def slopes(network: ThermalNetwork, power_w: Vector, ambient_c: float, nodes_c: Vector) -> Vector:
    """Return dT/dt by the law of each edge, written out."""
    heat_w = power_w - np.array(network.ambient_w_per_k) * (nodes_c - ambient_c)
    for left, right, conductance in network.edges:
        flow_w = conductance * (nodes_c[left] - nodes_c[right])
        heat_w[left] -= flow_w
        heat_w[right] += flow_w
    return np.asarray(heat_w / network.capacities_j_per_k)


def fastest_per_s(network: ThermalNetwork) -> float:
    """Return a bound of the fastest rate (Gershgorin)."""
    sums = np.array(network.ambient_w_per_k)
    for left, right, conductance in network.edges:
        sums[[left, right]] += 2.0 * conductance
    return float((sums / network.capacities_j_per_k).max())


@FEW
@given(case=cases(), steps=st.integers(1, 150), stiffness=st.floats(0.01, 0.3))
def test_exact_integration_equals_small_steps_of_runge_and_kutta(case, steps, stiffness):
    network, start_c, power_w, ambient_c = case
    step_s = stiffness / fastest_per_s(network)
    slope = partial(slopes, network, power_w, ambient_c)
    now_c = start_c
    for _ in range(steps):
        k1 = slope(now_c)
        k2 = slope(now_c + 0.5 * step_s * k1)
        k3 = slope(now_c + 0.5 * step_s * k2)
        k4 = slope(now_c + step_s * k3)
        now_c = now_c + step_s * (k1 + 2.0 * k2 + 2.0 * k3 + k4) / 6.0
    # Each step is wrong by about (rate step)^5 / 120 of the way that is left.
    way_c = np.abs(start_c - network.steady_c(power_w, ambient_c)).max()
    found_c = network.end_c(start_c, power_w, ambient_c, steps * step_s)
    assert found_c == pytest.approx(now_c, abs=0.1 * stiffness**4 * way_c + 1e-7)


@FEW
@given(case=cases(), time_s=SECONDS, below_c=st.floats(0.0, 60.0))
def test_a_network_that_starts_below_its_steady_state_never_overshoots_it(case, time_s, below_c):
    network, start_c, power_w, ambient_c = case
    steady_c = network.steady_c(power_w, ambient_c)
    start_c = np.minimum(start_c, steady_c - below_c)
    assert (network.end_c(start_c, power_w, ambient_c, time_s) - steady_c).max() <= 1e-7


@FEW
@given(case=cases(), first_s=SECONDS, then_s=SECONDS)
def test_from_the_ambient_temperature_it_only_rises(case, first_s, then_s):
    network, start_c, power_w, ambient_c = case
    middle_c = network.end_c(np.full_like(start_c, ambient_c), power_w, ambient_c, first_s)
    later_c = network.end_c(middle_c, power_w, ambient_c, then_s)
    assert middle_c.min() >= ambient_c - 1e-7 and (later_c - middle_c).min() >= -1e-7


@FEW
@given(case=cases())
def test_in_the_steady_state_the_heat_that_enters_leaves(case):
    """The steady state is the limit of time, and stays."""
    network, start_c, power_w, ambient_c = case
    steady_c = network.steady_c(power_w, ambient_c)
    out_w = np.dot(network.ambient_w_per_k, steady_c - ambient_c)
    assert out_w == pytest.approx(power_w.sum(), rel=1e-6, abs=1e-6)
    near = pytest.approx(steady_c, rel=1e-7, abs=1e-6)
    assert network.end_c(start_c, power_w, ambient_c, 1e9) == near
    assert network.end_c(steady_c, power_w, ambient_c, 1000.0) == near


@FEW
@given(case=cases(), parts_s=st.lists(st.floats(0.0, 800.0), max_size=8))
def test_any_splitting_of_the_time_gives_the_same_end(case, parts_s):
    network, start_c, power_w, ambient_c = case
    now_c = start_c
    for part_s in (0.0, *parts_s):
        now_c = network.end_c(now_c, power_w, ambient_c, part_s)
    whole_c = network.end_c(start_c, power_w, ambient_c, fsum(parts_s))
    assert now_c == pytest.approx(whole_c, rel=1e-9, abs=1e-7)


@FEW
@given(case=cases(), duration_s=SECONDS, warmer_c=st.floats(0.0, 30.0))
def test_a_hotter_room_and_a_hotter_start_shift_everything(case, duration_s, warmer_c):
    network, start_c, power_w, ambient_c = case
    cool_c = network.end_c(start_c, power_w, ambient_c, duration_s)
    hot_c = network.end_c(start_c + warmer_c, power_w, ambient_c + warmer_c, duration_s)
    assert hot_c == pytest.approx(cool_c + warmer_c, abs=1e-6)
    # A hotter room alone warms every node, by no more than the room got hotter.
    room_c = network.end_c(start_c, power_w, ambient_c + warmer_c, duration_s) - cool_c
    assert room_c.min() >= -1e-7 and room_c.max() <= warmer_c + 1e-7


@FEW
@given(case=cases(), more=vectors(0.0, 50.0, 7), duration_s=SECONDS)
def test_more_power_anywhere_makes_nothing_cooler(case, more, duration_s):
    network, start_c, power_w, ambient_c = case
    more_w = power_w + more[: len(power_w)]
    less_c = network.end_c(start_c, power_w, ambient_c, duration_s)
    assert (network.end_c(start_c, more_w, ambient_c, duration_s) - less_c).min() >= -1e-7


def test_one_node_by_hand():
    """100 J/K and 2 W/K: 50 s to 1/e; 20 W hold it 10 K above the air."""
    node = ThermalNetwork(capacities_j_per_k=(100.0,), edges=(), ambient_w_per_k=(2.0,))
    end_c = node.end_c(np.array([25.0]), np.array([20.0]), 25.0, 50.0)
    assert end_c == pytest.approx([25.0 + 10.0 * (1.0 - exp(-1.0))])
