"""A training in which nothing changes any more ends with one line; a healthy one never does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from socflower import Int8Trainer, int8_
from socflower.errors import TrainingFailed
from socflower.precision import NITI, REAL_SCALES
from socflower.precision.algorithm import IntegerUpdate, Rounding
from socflower.precision.int8.network import INPUT
from socflower.precision.int8.stalling import (
    PATIENCE_SAMPLES,
    PATIENCE_STEPS,
    _on_every_path,
    guards,
)
from socflower.training.trainer import TrainingSpan
from tests.one_line import refused
from tests.precision.int8.test_batch_share import on_ring
from tests.precision.int8.test_frozen import low_rank_case
from tests.precision.networks import ALGORITHMS, NETWORKS, REACH, batches, build, int8
from tests.seeded import built

SIZE = PATIENCE_SAMPLES // PATIENCE_STEPS


def dead(name="plain", layer="3"):
    """Return a network in which a bias keeps all outputs of a ReLU at zero."""
    module = build(name)
    nn.init.constant_(module.get_submodule(layer).bias, -50.0)
    return module


def losses(model, count, size=SIZE, rate=0.05, progress=0.0):
    made = []
    for batch in batches(count, size):
        made.append(model.train_step(*batch, learning_rate=rate, progress=progress).loss)
    return made


def dies(train, *named):
    return refused(train, *named, error=TrainingFailed)


# ------------------------------------------------------------------------------ no gradient reaches the weights


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_network_whose_rectified_values_are_all_zero_is_refused_after_patience(algorithm):
    model = int8(dead(), algorithm)
    assert len(losses(model, PATIENCE_STEPS - 1)) == PATIENCE_STEPS - 1
    dies(lambda: losses(model, 1), "0: ", f"{PATIENCE_STEPS} steps", "learning rate below 0.05")


def test_a_learning_rate_that_kills_a_network_is_refused():
    """Biases leave the range of the sums, so that a ReLU lets nothing through."""
    model = int8("plain", REAL_SCALES)
    dies(lambda: losses(model, 200, rate=2.0), "learning rate below 2")


def test_small_batches_take_more_steps():
    model = int8(dead(), REAL_SCALES)
    assert len(losses(model, PATIENCE_SAMPLES // 2 - 1, size=2)) == PATIENCE_SAMPLES // 2 - 1
    dies(lambda: losses(model, 1, size=2), "0: ")


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_gradient_in_between_begins_again(algorithm):
    model = int8(dead(), algorithm)
    alive = model.parameters.vectors["3.bias"].data.copy()
    alive[...] = 0.0
    losses(model, PATIENCE_STEPS - 1)
    killed = model.parameters.vectors["3.bias"].data
    model.parameters.vectors["3.bias"].data = alive
    losses(model, 1)
    model.parameters.vectors["3.bias"].data = killed
    losses(model, PATIENCE_STEPS - 1)
    dies(lambda: losses(model, 1), "0: ")


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_loss_without_a_gradient_and_images_without_anything_are_no_stall(algorithm):
    """A single class is learned from the beginning, and black images leave a layer without bias nothing to do."""
    one_class = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 1))
    images, _ = batches(1, SIZE)[0]
    model = int8(built(lambda: one_class, 0), algorithm)
    plain = int8("normalised", algorithm)
    for _ in range(PATIENCE_STEPS + 2):
        model.train_step(images, np.zeros(SIZE, np.int32), progress=0.0)
        plain.train_step(images * 0, np.arange(SIZE, dtype=np.int32) % 5, progress=0.0)


@pytest.mark.parametrize("name", [*NETWORKS, "zero-branch", "dropped"])
@pytest.mark.parametrize("algorithm", ["niti", "real-scales"])
def test_healthy_trainings_go_on(name, algorithm):
    model = int8(name, ALGORITHMS[algorithm])
    assert len(losses(model, PATIENCE_STEPS + 2, size=SIZE)) == PATIENCE_STEPS + 2


def test_adapters_that_start_at_zero_go_on():
    module, images, labels = low_rank_case()
    model = int8(module, REAL_SCALES, shape=(192, 1, 1))
    assert guards(model.graph) == {"1.up", "1.down", "3.up", "3.down"}
    for _ in range(PATIENCE_STEPS + 2):
        model.train_step(images, labels, learning_rate=0.01)
    assert not model.parameters.stalls.to_json()[1]


def test_a_session_remembers_for_how_long_nothing_has_changed():
    trainer = Int8Trainer(learning_rate=0.05)
    module = dead()
    state = None
    pairs = [[tuple(map(torch.from_numpy, batch))] for batch in batches(PATIENCE_STEPS, SIZE)]
    span = TrainingSpan(total_steps=PATIENCE_STEPS, steps_per_epoch=PATIENCE_STEPS)
    for few in (pairs[:20], pairs[20:-1]):
        session = trainer.start(module, span, state)
        for pair in few:
            session.step(pair)
        state = session.finish().state
    session = trainer.start(module, span, state)
    dies(lambda: session.step(pairs[-1]), "0: ")


def test_all_members_of_a_ring_end_in_the_same_step():
    """One of them has no samples."""

    def train(peers):
        model = int8(dead(), NITI)
        count = 0
        for images, labels in batches(PATIENCE_STEPS + 1, SIZE):
            own = slice(0, SIZE - 2) if peers.rank == 0 else slice(SIZE - 2, SIZE)
            own = slice(0, 0) if peers.rank == 2 else own
            begun = model.begin_joint_step(images[own], labels[own], peers, progress=0.0)
            begun.exchange()
            try:
                begun.apply()
            except TrainingFailed as error:
                return count, str(error)
            count += 1
        return count, ""

    ends = on_ring(3, train)
    assert len(set(ends)) == 1
    assert ends[0][0] == PATIENCE_STEPS - 1 and "0: " in ends[0][1]


@pytest.mark.parametrize("below", [False, True])
def test_int8_modules_end_only_if_they_read_the_data(below):
    """Beside a module that gets its inputs from other layers, branches may train that int8 does not know."""
    inner = int8_(dead())
    module = nn.Sequential(nn.Conv2d(3, 3, 1), inner) if below else inner
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)

    def train():
        for images, labels in batches(PATIENCE_STEPS, SIZE):
            made = module(torch.from_numpy(images))
            optimizer.zero_grad()
            nn.functional.cross_entropy(made, torch.from_numpy(labels).long()).backward()
            optimizer.step()

    if below:
        train()
    else:
        dies(train, "0: ", "learning rate")


def reaches(graph, without):
    """Return whether the output depends on the input if a value is held."""
    known = {INPUT}
    for node in graph.nodes:
        if node.name != without and not known.isdisjoint(node.inputs):
            known.add(node.name)
    return graph.output in known


@pytest.mark.parametrize("name", [*NETWORKS, *REACH])
def test_a_value_on_every_path_is_one_without_which_nothing_reaches_the_output(name):
    graph = int8(name).graph
    expected = {node.name for node in graph.nodes if not reaches(graph, node.name)}
    assert _on_every_path(graph) == expected
    first = next(n.name for n in graph.nodes if "weight" in n.trained and n.name in expected)
    assert guards(graph) == {first}


def test_nothing_guards_a_network_that_trains_beside_its_weights():
    module, _, _ = low_rank_case()
    module[3].base.bias.requires_grad_(True)
    assert guards(int8(module, shape=(192, 1, 1)).graph) == frozenset()


# ------------------------------------------------------------------------------------- no int8 weight changes


def nearest(*bits):
    """Return NITI with rounding to nearest: with less than 0 bits no gradient changes a weight."""
    starts = (0.0, 0.5)[: len(bits)]
    update = IntegerUpdate(bits=bits, starts=starts, rounding=Rounding.NEAREST)
    return replace(NITI, name="nearest", update=update)


def test_bits_that_change_no_weight_are_refused():
    model = int8("plain", nearest(-1))
    before = {name: each.data.copy() for name, each in model.parameters.weights.items()}
    assert len(losses(model, PATIENCE_STEPS - 1)) == PATIENCE_STEPS - 1
    dies(lambda: losses(model, 1), "-1 gradient bits", "gradient_bits")
    for name, data in before.items():
        np.testing.assert_array_equal(model.parameters.weights[name].data, data)


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_bits_that_end_a_training_may_change_nothing(progress):
    """The session may have been resumed there."""
    model = int8("plain", nearest(0, -1))
    losses(model, PATIENCE_STEPS + 2, progress=progress)


def test_with_few_bits_carries_change_weights():
    few = replace(NITI, name="few", update=IntegerUpdate(bits=(-4,), starts=(0.0,)))
    losses(int8("plain", few), PATIENCE_STEPS + 2)
