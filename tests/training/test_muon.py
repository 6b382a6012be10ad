"""Muon for hidden layers: the arithmetic of its author, memory layouts, and states that continue."""

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from socflower.training.fp32 import FP32Trainer, accumulates_gradients
from socflower.training.muon import hidden_weights, muon
from socflower.training.schedules import cosine_annealing
from socflower.training.trainer import TrainingSpan
from tests.one_line import refused
from tests.seeded import built
from tests.training.by_torch import assert_close, assert_equal, by_torch, trained

RATE, MOMENTUM, DECAY = 0.01, 0.95, 0.1


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 8, 1, 6, 6, generator=generator)
    return list(zip(inputs, torch.randint(0, 3, (count, 8), generator=generator), strict=True))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_hidden_layers_step_as_torchs_muon_on_matrices_and_the_others_as_adamw() -> None:
    model = built(network, 2)
    reference = copy.deepcopy(model)
    hidden = hidden_weights(reference.parameters())
    assert [tuple(each.shape) for each in hidden] == [(6, 4, 3, 3), (8, 24)]
    matrices = [nn.Parameter(each.detach().flatten(1)) for each in hidden]
    rest = [each for each in reference.parameters() if all(each is not own for own in hidden)]
    steps = (
        torch.optim.AdamW(rest, lr=RATE, weight_decay=DECAY),
        torch.optim.Muon(matrices, RATE, DECAY, MOMENTUM, adjust_lr_fn="match_rms_adamw"),
    )
    ours = muon(RATE, MOMENTUM, DECAY)(model.parameters())
    for _ in range(3):
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            own.grad = torch.randn(own.shape)
            other.grad = own.grad.clone()
        for matrix, weight in zip(matrices, hidden, strict=True):
            assert weight.grad is not None
            matrix.grad = weight.grad.flatten(1)
        for each in (ours, *steps):
            each.step()
    # The matrices share the memory of the reference's kernels.
    assert_equal(model, reference)


def test_channels_last_takes_the_same_steps() -> None:
    one, other = built(network, 2), built(network, 2)
    steps = [[each] for each in batches(2)]
    trained(FP32Trainer(optimizer=muon(RATE)), one, steps)
    trained(FP32Trainer(optimizer=muon(RATE), channels_last=True), other, steps)
    assert_close(other, one, rtol=0.02, atol=1e-3)


def test_a_session_continues_from_a_state_to_the_same_bits() -> None:
    trainer = FP32Trainer(optimizer=muon(RATE, weight_decay=DECAY), scheduler=cosine_annealing)
    model, span = built(network, 2), TrainingSpan(total_steps=4)
    whole = by_torch(
        copy.deepcopy(model),
        muon(RATE, weight_decay=DECAY),
        [partial(loss_of, batch=each) for each in batches(1)],
    )
    session = trainer.start(model, span)
    session.step([batches(1)[0]])
    assert_equal(model, whole)
    continued = copy.deepcopy(model)
    again = trainer.start(continued, span, session.state())
    for batch in batches(4)[1:]:
        session.step([batch])
        again.step([batch])
    assert_equal(continued, model)
    assert accumulates_gradients(again)


def test_hooks_of_torch_see_one_step() -> None:
    seen: list[object] = []
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        trained(FP32Trainer(optimizer=muon(RATE)), built(network, 2), [[batches(1)[0]]])
    finally:
        hook.remove()
    assert len(seen) == 1


def test_a_model_without_hidden_layers_is_refused() -> None:
    refused(lambda: muon()(nn.Linear(3, 2).parameters()), "muon", "'adamw'")
