"""Training on an accelerator: everything is moved there and back, and what torch finds is what is used.

The accelerator is a fake one that computes as the CPU does, so that a training there must give the CPU's very bits.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Context
from torch import nn
from torch.optim.lr_scheduler import StepLR

from socflower.model_graph.random_state import RandomState, forked_generator, own_random_state
from socflower.model_graph.torch_device import accelerator, resolve_device
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.group import GroupOutcome, train_group
from socflower.training.schedules import cosine_annealing
from socflower.training.trainer import TrainingSpan
from socflower.wire.message_keys import METRICS
from socflower.workloads.evaluation import evaluate
from socflower.workloads.map_dataset import MapDataset
from tests.clients.test_app import make_app, message, node, part
from tests.fake_device import MODULE, fake_device  # noqa: F401 - a fixture
from tests.one_line import refused
from tests.rows import Rows
from tests.seeded import built
from tests.training.by_torch import assert_close, assert_equal
from tests.training.test_batches import task
from tests.training.test_group import group, small_data

pytestmark = pytest.mark.usefixtures("fake_device")


def network() -> nn.Sequential:
    """Every kind of state: weights, a frozen weight, running statistics and a counter, and a layer that draws."""

    def layers() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64, 8),
            nn.Linear(8, 3),
        )

    made = built(layers, 3)
    made[5].bias.requires_grad_(False)
    return made


def mean_of_own_step(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, label_smoothing=0.1)


TRAINERS = {
    "sgd": {"optimizer": sgd(0.1, 0.9), "scheduler": cosine_annealing},
    "adamw": {
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "scheduler": lambda made, steps: StepLR(made, 3),
    },
    "own step, clipped, accumulated": {
        "train_step": mean_of_own_step,
        "max_grad_norm": 0.5,
        "accumulation_steps": 2,
    },
    "a pass for each member, summed in a ring's order": {"reduction": "ring"},
    "in another layout": {"channels_last": True},
}


def trained(
    device: str,
    settings: dict[str, Any],
    make: Callable[[], nn.Module] = network,
) -> tuple[nn.Module, GroupOutcome]:
    model = make()
    data = small_data(48)
    trainer = FP32Trainer(device=device, **settings)
    work = group(
        capacities=(1.0, 2.0),
        num_steps=4,
        steps_per_epoch=4,
        total_steps=8,
        num_samples=48,
        proximal_mu=0.1,
        num_buckets=3,
    )
    state = train_group(model, data, work, trainer).end.state
    return model, train_group(model, data, replace(work, first_step=4), trainer, state)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_training_on_the_accelerator_has_the_weights_of_the_cpu(name: str) -> None:
    (ours, outcome), (reference, expected) = (
        trained(device, TRAINERS[name]) for device in ("auto", "cpu")
    )
    assert {each.device.type for each in ours.state_dict().values()} == {"fake"}
    assert outcome.mean_loss == pytest.approx(expected.mean_loss, rel=1e-6)
    # In another layout a convolution of the fake device sums in another order.
    same = partial(assert_close, atol=1e-6, rtol=1e-5) if "layout" in name else assert_equal
    same(ours.cpu(), reference)


def test_autocast_is_that_of_the_device() -> None:
    """The fake device casts what linear layers read, and the CPU's autocast leaves it alone."""

    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))

    weights = [
        trained(device, {"autocast": kind}, lambda: built(layers, 3))[0][1].weight.detach().cpu()
        for device, kind in (("auto", torch.bfloat16), ("cpu", torch.bfloat16), ("auto", None))
    ]
    torch.testing.assert_close(weights[0], weights[1], atol=1e-3, rtol=1e-2)
    assert not torch.allclose(weights[0], weights[2], atol=1e-6, rtol=1e-6)


def test_the_state_of_a_training_is_on_the_cpu_and_continues_on_either_device() -> None:
    model = network()
    data = small_data(48)
    adam = partial(torch.optim.Adam, lr=0.01)
    work = task(0, 1, num_steps=3, steps_per_epoch=3, num_samples=48)
    state = train_group(model, data, work, FP32Trainer(optimizer=adam)).end.state
    ends = []
    for device in ("auto", "cpu"):
        ends.append(copy.deepcopy(model).cpu() if device == "cpu" else copy.deepcopy(model))
        train_group(ends[-1], data, work, FP32Trainer(device=device, optimizer=adam), state)
    assert_equal(*(each.cpu() for each in ends))


def test_batches_of_any_form_follow_the_model() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(36, 3)

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(images.flatten(1))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def as_dict(rows: Any) -> dict[str, torch.Tensor]:
        images, labels = zip(*rows, strict=True)
        return {"images": torch.stack(images), "labels": torch.tensor(labels)}

    data = MapDataset(Rows(small_data(24)), collate_fn=as_dict)
    work = task(0, 1, num_steps=2, steps_per_epoch=2, num_samples=24)
    ends = []
    for device in ("auto", "cpu"):
        ends.append(built(Pair, 1))
        train_group(ends[-1], data, work, FP32Trainer(device=device))
        assert ends[-1].layer.weight.device == resolve_device(device, "test")
    assert_equal(*(each.cpu() for each in ends))


def test_an_evaluation_runs_where_it_is_told_or_where_the_model_is() -> None:
    data = small_data(40)
    expected = evaluate(network(), small_data(40))
    model = network()
    assert evaluate(model, data, device="auto") == expected == evaluate(model, data)
    assert next(model.parameters()).device == accelerator()
    assert evaluate(model, data, device="cpu") == expected
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("work", [None, task(0, 1, num_samples=48)])
def test_a_client_sends_and_gets_tensors_of_the_cpu(work: Any) -> None:
    replies = []
    for device in ("auto", "cpu"):
        app = make_app(trainer=FP32Trainer(optimizer=sgd(0.1), device=device))
        asked = message(group=work) if work else message(**{"batch-size": 4})
        replies.append(app(asked, node(2)).content)
    ours, expected = (reply.array_records["arrays"].to_torch_state_dict() for reply in replies)
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    assert replies[0][METRICS] == replies[1][METRICS]


def test_random_numbers_of_the_accelerator_are_seeded_and_restored() -> None:
    MODULE.state = 7
    with own_random_state(1, 2):
        within = MODULE.state
        kept = RandomState()
        with forked_generator(5):
            assert MODULE.state == 5
        MODULE.state = 6
        kept.restore()
        assert MODULE.state == within
    assert MODULE.state == 7
    with own_random_state(1, 3):
        assert MODULE.state not in (7, within)


def test_auto_is_the_accelerator_if_there_is_one() -> None:
    assert (
        resolve_device("auto", "test")
        == torch.ones(1, device="fake").device
        == resolve_device("fake", "test")
    )
    assert resolve_device("cpu", "test") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("cuda", ("fake:0", "cpu", "auto")),
        ("fake:1", ("fake:0", "cpu")),
        ("gpu 0", ("auto", "cuda:N", "mps")),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, named: tuple[str, ...]) -> None:
    trainer = FP32Trainer(device=name)
    refused(lambda: trainer.start(network(), TrainingSpan()), f"device = {name!r}", *named)


def test_a_client_evaluates_on_its_trainers_device() -> None:
    seen: list[torch.device] = []

    def noted(model: nn.Module, batch: Any) -> dict[str, float]:
        seen.append(batch[0].device)
        return {"loss": 0.0}

    def made(context: Context) -> FP32Trainer:
        return FP32Trainer(device="cpu")

    for trainer in (FP32Trainer(), FP32Trainer(device="cpu"), made):
        make_app(trainer=trainer, evaluate_data_fn=part, evaluate_step=noted)(
            message("evaluate"), node(2)
        )
    assert [each.type for each in seen] == ["fake", "cpu", "cpu"]
