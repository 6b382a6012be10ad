"""The strategy's train config reaches the function that makes the trainer; what nobody reads is refused."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from flwr.app import Context

from socflower.errors import ConfigError
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.wire.message_keys import GroupTask
from tests.clients.test_app import assert_weights, make_app, message, node, trained_alone
from tests.one_line import refused
from tests.training.test_batches import task


def by_config(context: Context, config: Mapping[str, Any]) -> FP32Trainer:
    return FP32Trainer(optimizer=sgd(config["lr"], momentum=config.get("momentum", 0.0)))


def test_settings_that_the_function_reads_are_those_of_the_trainer() -> None:
    reply = make_app(trainer=by_config)(message(lr=0.3, momentum=0.5, **{"batch-size": 4}), node(2))
    assert_weights(
        reply,
        trained_alone(batch_size=4, num_epochs=1, trainer=FP32Trainer(optimizer=sgd(0.3, 0.5))),
    )


def test_the_trainers_own_functions_may_read_settings_too() -> None:
    def lazy(context: Context, config: Mapping[str, Any]) -> FP32Trainer:
        return FP32Trainer(
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=config["lr"], momentum=0.5)
        )

    reply = make_app(trainer=lazy)(message(lr=0.3, **{"batch-size": 4}), node(2))
    assert_weights(
        reply,
        trained_alone(batch_size=4, num_epochs=1, trainer=FP32Trainer(optimizer=sgd(0.3, 0.5))),
    )
    refused(lambda: make_app(trainer=lazy)(message(lr=0.3, moment=0.5), node(2)), "moment")
    refused(lambda: make_app(trainer=lazy)(message(), node(2)), "lr")


@pytest.mark.parametrize("group", [None, task(0, 1, num_samples=48)])
def test_a_setting_that_no_function_reads_is_refused_before_training(
    group: GroupTask | None,
) -> None:
    refused(
        lambda: make_app(trainer=by_config)(message(lr=0.3, moment=0.5, group=group), node(2)),
        "moment",
    )


def test_a_function_that_reads_all_settings_knows_them_all() -> None:
    def trainer(context: Context, config: Mapping[str, Any]) -> FP32Trainer:
        settings = {key: value for key, value in config.items() if key in ("lr", "momentum")}
        return FP32Trainer(optimizer=sgd(settings["lr"], settings["momentum"]))

    reply = make_app(trainer=trainer)(message(lr=0.3, momentum=0.5, **{"batch-size": 4}), node(2))
    assert_weights(
        reply,
        trained_alone(batch_size=4, num_epochs=1, trainer=FP32Trainer(optimizer=sgd(0.3, 0.5))),
    )


def test_a_setting_that_was_not_sent_is_named_with_how_to_send_it() -> None:
    words = "reads 'lr' of the train config, which was not sent; give it by the strategy's start(..., train_config="
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_app(trainer=by_config)(message(), node(2))


def test_another_missing_key_of_the_function_is_its_own_error() -> None:
    def trainer(context: Context, config: Mapping[str, Any]) -> FP32Trainer:
        return FP32Trainer(optimizer=sgd({"slow": 0.1}["fast"]))

    with pytest.raises(KeyError, match="fast"):
        make_app(trainer=trainer)(message(), node(2))


def test_a_function_without_a_config_is_called_without() -> None:
    def trainer(context: Context, rate: float = 0.3) -> FP32Trainer:
        return FP32Trainer(optimizer=sgd(rate, 0.0))

    reply = make_app(trainer=trainer)(message(**{"batch-size": 4}), node(2))
    assert_weights(
        reply,
        trained_alone(batch_size=4, num_epochs=1, trainer=FP32Trainer(optimizer=sgd(0.3, 0.0))),
    )


def test_a_function_that_returns_no_trainer_is_told() -> None:
    refused(lambda: make_app(trainer=lambda context: None)(message(), node(2)), "NoneType")


def test_a_group_keeps_its_settings_since_its_optimiser_continues() -> None:
    app, context = make_app(trainer=by_config), node(2)
    interval = {"num_samples": 48, "total_steps": 4, "num_steps": 2, "steps_per_epoch": 6}
    app(message(lr=0.3, momentum=0.9, group=task(0, 1, **interval)), context)
    second = task(0, 1, **interval | {"first_step": 2})
    app(message(lr=0.3, momentum=0.9, group=second), context)
    app(message(lr=0.3, momentum=0.9, group=task(0, 1, **interval)), context)
    refused(lambda: app(message(lr=0.1, momentum=0.9, group=second), context), "trainer")
