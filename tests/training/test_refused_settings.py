"""A setting that a trainer does not take is refused when the trainer is made, by name and value."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from socflower.precision.cpu_share import MIXING_RULES
from socflower.training.fp32 import REDUCTIONS, FP32Trainer, sgd
from socflower.training.int8 import Int8Trainer
from socflower.training.mixed_precision import MixedPrecisionTrainer
from socflower.training.trainer import TrainingSpan
from tests.one_line import refused

VALUES: list[tuple[Callable[..., Any], str, tuple[Any, ...]]] = [
    (sgd, "learning_rate", (0.0, -0.1, math.nan, math.inf)),
    (sgd, "momentum", (-0.1, 1.0, math.nan)),
    (sgd, "weight_decay", (-0.1, math.nan, math.inf)),
    (FP32Trainer, "reduction", ("sometimes",)),
    (FP32Trainer, "loss_weight", (3,)),
    (FP32Trainer, "optimizer", (3,)),
    (FP32Trainer, "accumulation_steps", (0, 1.5)),
    (FP32Trainer, "max_grad_norm", (0.0, math.nan)),
    (FP32Trainer, "autocast", (torch.float16,)),
    (Int8Trainer, "schedule", ("linear",)),
    (Int8Trainer, "learning_rate", (0.0, math.nan)),
    (Int8Trainer, "device", ("cuda",)),
    (MixedPrecisionTrainer, "rule", ("most",)),
]


@pytest.mark.parametrize(
    ("make", "key", "value"), [(make, key, value) for make, key, each in VALUES for value in each]
)
def test_a_value_is_refused_with_its_key(make: Callable[..., Any], key: str, value: Any) -> None:
    refused(lambda: make(**{key: value}), make.__name__, key, value)


@pytest.mark.parametrize(
    ("make", "settings", "named"),
    [
        (FP32Trainer, {"reduction": "sometimes"}, REDUCTIONS),
        (FP32Trainer, {"train_step": len, "loss": functional.nll_loss}, ("train_step", "loss")),
        (FP32Trainer, {"optimizer": torch.optim.AdamW([torch.zeros(1)])}, ("optimizer = AdamW",)),
        (FP32Trainer, {"optimizer": None}, ("optimizer = None",)),
        (Int8Trainer, {"schedule": "linear"}, ("schedule", "cosine", "constant")),
        (MixedPrecisionTrainer, {"rule": "most"}, MIXING_RULES),
        (MixedPrecisionTrainer, {"fp32": FP32Trainer(train_step=len)}, ("train_step",)),
        (MixedPrecisionTrainer, {"fp32": FP32Trainer(loss_weight=len)}, ("loss_weight",)),
        (MixedPrecisionTrainer, {"fp32": FP32Trainer(device="cuda")}, ("cuda", "CPU")),
        (MixedPrecisionTrainer, {"held_out": torch.zeros(0, 1, 6, 6)}, ("held_out",)),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    make: Callable[..., Any], settings: dict[str, Any], named: tuple[str, ...]
) -> None:
    refused(lambda: make(**settings), make.__name__, *named)


def test_a_trainer_of_integer_kernels_is_on_the_cpu() -> None:
    assert Int8Trainer(device="auto").device == MixedPrecisionTrainer().fp32.device == "cpu"


@pytest.mark.parametrize("trainer", [FP32Trainer(), Int8Trainer(), MixedPrecisionTrainer()])
def test_a_model_without_anything_to_train_is_refused(trainer: Any) -> None:
    frozen = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    for model, named in ((frozen, "Sequential"), (nn.Flatten(), "Flatten")):
        refused(lambda model=model: trainer.start(model, TrainingSpan()), named, "nothing to train")


def test_int8_has_no_proximal_term() -> None:
    span = TrainingSpan(proximal_mu=0.5)
    refused(lambda: Int8Trainer().start(nn.Linear(2, 2), span), "proximal-mu = 0.5", "FP32Trainer")
