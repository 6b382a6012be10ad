"""A loop of torch's own, as a reference for trainers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from socflower.training.fp32 import OptimizerFn
from socflower.training.trainer import TrainingSpan


def by_torch(
    model: nn.Module,
    optimizer: OptimizerFn,
    losses: Iterable[Callable[[nn.Module], Tensor]],
    *,
    max_norm: float | None = None,
) -> nn.Module:
    """Train the model in place, one step a loss, and return it."""
    own = optimizer(model.parameters())
    for loss_of in losses:
        own.zero_grad()
        loss_of(model).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        own.step()
    return model


def trained(
    trainer: Any, model: nn.Module, steps: Sequence[Sequence[Any]], **span: Any
) -> nn.Module:
    """Train the model in place on the members' parts of each step, and return it."""
    whole = TrainingSpan(num_members=len(steps[0]), total_steps=len(steps), **span)
    session = trainer.start(model, whole)
    for parts in steps:
        assert torch.isfinite(session.step(parts))
    session.finish()
    return model


def assert_close(
    ours: nn.Module, reference: nn.Module, *, rtol: float = 1e-4, atol: float = 2e-6
) -> None:
    """Compare parameters and buffers."""
    torch.testing.assert_close(
        dict(ours.state_dict()), dict(reference.state_dict()), rtol=rtol, atol=atol
    )


def assert_equal(ours: nn.Module, reference: nn.Module) -> None:
    """Compare parameters and buffers bit for bit."""
    assert_close(ours, reference, rtol=0.0, atol=0.0)
