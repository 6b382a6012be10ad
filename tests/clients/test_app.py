"""The wrapper: a node alone, a leader for its group, and what it keeps from one message to the next."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from socflower.clients.app import make_client_app
from socflower.clients.saved_training import TRAINER_STATE
from socflower.errors import ConfigError
from socflower.flower_adapter import begin_run
from socflower.training.batches import local_batches
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.training.group import train_group
from socflower.training.schedules import cosine_annealing
from socflower.training.trainer import TrainingSpan
from socflower.wire.message_keys import RESUMED, WARM_UP, GroupTask
from socflower.workloads.dataset import LabelledData
from socflower.workloads.evaluation import evaluate
from tests.one_line import refused
from tests.training.test_batches import task
from tests.training.test_group import small_data, small_network

DATA = small_data(48)
TRAINER = FP32Trainer(optimizer=sgd(0.05, 0.9))
fresh = partial(small_network, norm=False)


def part(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
    """All data for (0, 1), else every `num_partitions`-th sample."""
    return DATA.select(list(range(partition_id, len(DATA), num_partitions)))


def make_app(**changes: object) -> ClientApp:
    settings: dict[str, object] = {"trainer": TRAINER}
    return make_client_app(lambda context: fresh(), part, **(settings | changes))


def node(partition_id: int = 0, num_partitions: int = 4) -> Context:
    return Context(
        run_id=1,
        node_id=5,
        state=RecordDict(),
        run_config={},
        node_config={"partition-id": partition_id, "num-partitions": num_partitions},
    )


def weights(model: nn.Module) -> ArrayRecord:
    return ArrayRecord({name: tensor.contiguous() for name, tensor in model.state_dict().items()})


def message(
    message_type: str = "train",
    *,
    model: nn.Module | None = None,
    group: GroupTask | None = None,
    **config: object,
) -> Message:
    begin_run(1)
    content = RecordDict({"arrays": weights(model or fresh()), "config": ConfigRecord(config)})
    if group is not None:
        content["group"] = ConfigRecord(group.encode())
    return Message(content, 5, message_type)


def metrics_of(reply: Message) -> MetricRecord:
    return reply.content.metric_records["metrics"]


def assert_weights(reply: Message, expected: nn.Module) -> None:
    trained = reply.content.array_records["arrays"].to_torch_state_dict()
    assert list(trained) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(trained[name], tensor.contiguous()), name


def one_thread(train: Callable[[], object]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train()
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------- alone
def trained_alone(
    *,
    batch_size: int,
    num_epochs: int,
    seed: int = 1,
    first_epoch: int = 0,
    first_step: int = 0,
    total_steps: int = 10**6,
    trainer: FP32Trainer = TRAINER,
) -> nn.Module:
    """Return the model after the batches of a client on partition 2 of 4, without Flower."""
    model, data = fresh(), part(node(), 2, 4)

    def train() -> None:
        session = trainer.start(model, TrainingSpan(first_step=first_step, total_steps=total_steps))
        for indices in local_batches(
            len(data), batch_size, num_epochs, seed=(seed, 2), first_epoch=first_epoch
        ):
            session.step([data.batch(torch.from_numpy(indices))])

    one_thread(train)
    return model


def test_a_node_alone_trains_its_own_partition_by_the_messages_config() -> None:
    config = {"batch-size": 5, "local-epochs": 3, "seed": 4}
    reply = make_app()(message(**config), node(2))
    assert_weights(reply, trained_alone(batch_size=5, num_epochs=3, seed=4))
    assert metrics_of(reply)["num-examples"] == 12 * 3
    assert math.isfinite(metrics_of(reply)["train-loss"])


def test_without_a_config_it_is_one_epoch_of_batches_of_32() -> None:
    begin_run(1)
    bare = Message(RecordDict({"arrays": weights(fresh())}), 5, "train")
    assert_weights(make_app()(bare, node(2)), trained_alone(batch_size=32, num_epochs=1))


def test_the_next_round_sees_other_batches() -> None:
    app = make_app()
    second = app(message(**{"server-round": 2, "batch-size": 4}), node(2))
    assert_weights(second, trained_alone(batch_size=4, num_epochs=1, first_epoch=1))


def test_a_schedule_goes_on_across_rounds_if_their_number_is_known() -> None:
    """Round 2 of 4, three steps a round: from step 3 of 12."""
    cosine = FP32Trainer(optimizer=sgd(0.05, 0.9), scheduler=cosine_annealing)
    config = {"server-round": 2, "batch-size": 4}
    reply = make_app(trainer=cosine)(message(**config, **{"num-rounds": 4}), node(2))
    assert_weights(
        reply,
        trained_alone(
            batch_size=4, num_epochs=1, first_epoch=1, first_step=3, total_steps=12, trainer=cosine
        ),
    )
    without = make_app(trainer=cosine)(message(**config), node(2))
    assert_weights(
        without,
        trained_alone(
            batch_size=4, num_epochs=1, first_epoch=1, first_step=3, total_steps=6, trainer=cosine
        ),
    )


def test_a_node_alone_keeps_nothing() -> None:
    context = node(2)
    make_app()(message(), context)
    assert TRAINER_STATE not in context.state


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch-size", 0),
        ("batch-size", -1),
        ("batch-size", 2.5),
        ("batch-size", "8"),
        ("local-epochs", 0),
        ("num-rounds", 0),
        ("seed", 0),
        ("server-round", 0),
    ],
)
def test_a_setting_that_cannot_be_is_named(key: str, value: object) -> None:
    refused(lambda: make_app()(message(**{key: value}), node()), "train", f"{key} = {value!r}")


def test_a_node_without_samples_is_told_so() -> None:
    app = make_app()
    refused(lambda: app(message(), node(48, 49)), "data_fn", "48", "49")


@pytest.mark.parametrize("missing", ["partition-id", "num-partitions"])
def test_a_node_without_its_partition_is_told_how_to_start(missing: str) -> None:
    context = node()
    del context.node_config[missing]
    refused(
        lambda: make_app()(message(), context),
        f"node 5: its node config lacks '{missing}'; start the SuperNode with --node-config",
    )


# -------------------------------------------------------------------------------------------------- a group
def group_task(**changes: object) -> GroupTask:
    """The second of two groups of two over four partitions; three steps an epoch."""
    values: dict[str, object] = {
        "members": (2, 3),
        "partitions": (2, 3),
        "num_partitions": 4,
        "capacities": (1.0, 2.0),
        "num_steps": 2,
        "steps_per_epoch": 3,
        "total_steps": 6,
        "num_samples": len(DATA),
    }
    return task(1, 2, **(values | changes))


def trained_as_group(
    group: GroupTask, data: LabelledData, model: nn.Module, state: bytes | None = None
) -> bytes:
    new_state = b""

    def train() -> None:
        nonlocal new_state
        new_state = train_group(model, data, group, TRAINER, state).end.state

    one_thread(train)
    return new_state


def test_a_leader_trains_its_whole_group_on_all_data_where_they_are_dealt_anew() -> None:
    expected = fresh()
    trained_as_group(group_task(), DATA, expected)
    reply = make_app()(message(group=group_task()), node(2))
    assert_weights(reply, expected)
    assert metrics_of(reply)["num-examples"] == 16  # two of three steps over half of 48


def test_where_data_stay_a_group_uses_its_members_partitions_only() -> None:
    asked: list[tuple[int, int]] = []

    def watched(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
        asked.append((partition_id, num_partitions))
        return part(context, partition_id, num_partitions)

    stay, expected = group_task(reshuffle=False), fresh()
    trained_as_group(stay, [part(node(), 2, 4), part(node(), 3, 4)], expected)
    app = make_client_app(lambda context: fresh(), watched, TRAINER)
    assert_weights(app(message(group=stay), node(2)), expected)
    assert asked == [(2, 4), (3, 4)]


def test_momentum_goes_on_from_one_message_to_the_next() -> None:
    app, context, model = make_app(), node(2), fresh()
    state = trained_as_group(group_task(), DATA, model)
    first = app(message(group=group_task()), context)
    assert_weights(first, model)
    following = group_task(first_step=2)
    second = app(message(group=following, model=model), context)
    without_momentum, with_momentum = fresh(), fresh()
    for copy in (without_momentum, with_momentum):
        copy.load_state_dict(model.state_dict())
    trained_as_group(following, DATA, with_momentum, state)
    trained_as_group(following, DATA, without_momentum, None)
    assert_weights(second, with_momentum)
    with pytest.raises(AssertionError):
        assert_weights(second, without_momentum)


@pytest.mark.parametrize(
    "changes",
    [
        {"first_step": 0},  # the training begins again
        {"first_step": 4},  # an interval was missed
        {"first_step": 2, "total_steps": 9},  # a longer training
        {"first_step": 2, "num_groups": 3},
        {"first_step": 2, "group_id": 0},
    ],
)
def test_momentum_of_another_plan_is_not_taken_up(changes: dict[str, int]) -> None:
    app, context = make_app(), node(2)
    app(message(group=group_task()), context)
    base = group_task()
    other = GroupTask(**({key: getattr(base, key) for key in base.__dataclass_fields__} | changes))
    expected = fresh()
    trained_as_group(other, DATA, expected)
    assert_weights(app(message(group=other), context), expected)


def test_a_group_that_diverged_starts_its_momentum_anew() -> None:
    app, context = make_app(), node(2)
    spoilt = fresh()
    with torch.no_grad():
        next(spoilt.parameters()).fill_(math.nan)
    reply = app(message(group=group_task(), model=spoilt), context)
    assert math.isnan(metrics_of(reply)["train-loss"])
    following, expected = group_task(first_step=2), fresh()
    trained_as_group(following, DATA, expected)
    assert_weights(app(message(group=following), context), expected)


def test_a_group_record_of_another_version_is_refused() -> None:
    odd = message(group=group_task())
    del odd.content.config_records["group"]["seed"]
    refused(lambda: make_app()(odd, node(2)), "seed")


# --------------------------------------------------------------------------------------------------- others
def test_evaluation_is_of_the_nodes_own_data() -> None:
    reply = make_app(evaluate_data_fn=part)(message("evaluate"), node(1))
    expected = evaluate(fresh(), part(node(), 1, 4))
    assert dict(metrics_of(reply)) == {
        "accuracy": expected.accuracy,
        "loss": pytest.approx(expected.loss),
        "num-examples": 12,
    }


def test_without_evaluation_data_there_is_no_evaluation() -> None:
    with pytest.raises(ValueError, match="evaluate"):
        make_app()(message("evaluate"), node())


def test_the_default_trainer_and_one_made_for_the_node_are_used() -> None:
    plain = make_app(trainer=None)(message(**{"batch-size": 5}), node(2))
    assert_weights(plain, trained_alone(batch_size=5, num_epochs=1, trainer=FP32Trainer()))
    asked: list[Context] = []

    def for_node(context: Context) -> FP32Trainer:
        asked.append(context)
        return TRAINER

    context = node(2)
    made = make_app(trainer=for_node)(message(**{"batch-size": 5}), context)
    assert_weights(made, trained_alone(batch_size=5, num_epochs=1))
    assert asked == [context]


def test_mods_see_the_message_and_the_reply() -> None:
    seen: list[str] = []

    def watch(sent: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seen.append("before")
        reply = call_next(sent, context)
        seen.append("after" if reply.has_content() else "failed")
        return reply

    make_app(mods=[watch])(message(), node())
    assert seen == ["before", "after"]


def test_threads_are_as_before_afterwards() -> None:
    inside: list[int] = []
    before = torch.get_num_threads()

    def make_model(context: Context) -> nn.Module:
        inside.append(torch.get_num_threads())
        return fresh()

    app = make_client_app(make_model, part, TRAINER, num_threads=before + 1)
    app(message(), node())
    assert torch.get_num_threads() == before
    with pytest.raises(ConfigError):
        app(message(**{"batch-size": 0}), node())
    assert torch.get_num_threads() == before
    assert inside == [before + 1, before + 1]


def test_data_that_are_not_what_the_strategy_was_told_are_refused() -> None:
    """A data function that ignores its arguments, as Flower's habits suggest, returns one part for the whole."""
    refused(
        lambda: make_app()(message(group=group_task(num_samples=99)), node(2)),
        f"{len(DATA)}",
        "num_samples",
        "99",
    )


# ------------------------------------------------------------------------------------------- states in files
def half(first_step: int, **changes: object) -> GroupTask:
    """Return one of two intervals of four steps."""
    return task(
        0,
        1,
        first_step=first_step,
        num_steps=4,
        steps_per_epoch=8,
        total_steps=8,
        num_samples=len(DATA),
        **changes,
    )


def trained_weights(reply: Message) -> dict[str, torch.Tensor]:
    assert reply.has_content()
    return reply.content.array_records["arrays"].to_torch_state_dict()


def assert_equal_weights(one: Message, other: Message) -> None:
    left, right = trained_weights(one), trained_weights(other)
    assert all(torch.equal(left[name], right[name]) for name in (*left, *right))


def test_a_leader_without_memory_goes_on_from_its_file(tmp_path: Path) -> None:
    app, context = make_app(state_folder=lambda context: tmp_path), node()
    app(message(group=half(0)), context)
    remembered = app(message(group=half(4)), context)
    from_file = app(message(group=half(4), **{RESUMED: True}), node())
    assert_equal_weights(remembered, from_file)
    forgetful = make_app()(message(group=half(4)), node())
    assert any(
        not torch.equal(tensor, trained_weights(forgetful)[name])
        for name, tensor in trained_weights(from_file).items()
    ), "momentum makes no difference here"


@pytest.mark.parametrize("with_folder", [False, True])
def test_a_resumed_group_without_any_state_is_an_error_that_names_it(
    with_folder: bool, tmp_path: Path
) -> None:
    app = make_app(**({"state_folder": lambda context: tmp_path} if with_folder else {}))
    with pytest.raises(
        ConfigError, match=r"group 0 has no trainer state for step 4 of 8 to resume from"
    ) as caught:
        app(message(group=half(4), **{RESUMED: True}), node())
    assert "--fresh" in str(caught.value)
    assert (str(tmp_path) in str(caught.value)) == with_folder


def test_a_group_that_diverged_may_be_resumed_with_a_new_optimiser(tmp_path: Path) -> None:
    diverging = make_app(
        trainer=FP32Trainer(optimizer=sgd(1e30)), state_folder=lambda context: tmp_path
    )
    reply = diverging(message(group=half(0)), node())
    assert not math.isfinite(float(metrics_of(reply)["train-loss"]))  # type: ignore[arg-type]
    app = make_app(state_folder=lambda context: tmp_path)
    assert_equal_weights(
        app(message(group=half(4), **{RESUMED: True}), node()),
        make_app()(message(group=half(4)), node()),
    )


def test_a_new_training_takes_nothing_from_the_one_before(tmp_path: Path) -> None:
    app = make_app(state_folder=lambda context: tmp_path)
    app(message(group=half(0)), node())
    app(message(group=half(4)), node())
    assert len(list(tmp_path.iterdir())) == 2
    app(message(group=half(0)), node())
    assert [path.name for path in tmp_path.iterdir()] == [next(tmp_path.iterdir()).name]


def test_of_the_groups_of_a_warm_up_those_that_are_chosen_go_on(tmp_path: Path) -> None:
    """Several numbers of groups train in turn on one node, each with its own momentum and files."""
    app, own = make_app(state_folder=lambda context: tmp_path), node()
    tried = {number: replace(half(0), num_groups=number) for number in (1, 2)}
    for of_number in tried.values():
        app(message(group=of_number, **{WARM_UP: True}), own)
    assert len(list(tmp_path.iterdir())) == 2
    for of_number in tried.values():
        later = replace(of_number, first_step=4)
        alone, fresh = node(), make_app()
        fresh(message(group=of_number), alone)
        expected = fresh(message(group=later), alone)
        assert_equal_weights(app(message(group=later, **{WARM_UP: True}), own), expected)
        assert_equal_weights(app(message(group=later, **{RESUMED: True}), node()), expected)
    app(message(group=replace(tried[2], first_step=8)), own)
    kept = [key for key in own.state if key.startswith("socflower-trainer")]
    assert kept == ["socflower-trainer"]
    make_app(state_folder=lambda context: None)(message(group=half(0)), node())


# ---------------------------------------------------------------------------------------------- an app that exists
def own_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord(
            {"num-examples": 1, "mine": float(message.content["config"]["speed"])}
        )
        return Message(
            RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message
        )

    @app.evaluate()
    def evaluate_mine(message: Message, context: Context) -> Message:
        return Message(
            RecordDict({"metrics": MetricRecord({"num-examples": 1, "mine": 2.0})}),
            reply_to=message,
        )

    return app


def test_an_app_that_exists_answers_what_is_not_for_a_group() -> None:
    app = make_app(app=own_app())
    alone = app(message(speed=7.0), node())
    assert metrics_of(alone)["mine"] == 7.0
    assert_weights(alone, fresh())
    assert metrics_of(app(message("evaluate"), node()))["mine"] == 2.0
    expected = fresh()
    trained_as_group(group_task(), DATA, expected)
    assert_weights(app(message(group=group_task()), node(2)), expected)
    own_data = make_app(app=own_app(), evaluate_data_fn=part)
    assert "mine" not in metrics_of(own_data(message("evaluate"), node()))


def test_mods_of_an_app_that_exists_must_be_given_for_groups_too() -> None:
    refused(
        lambda: make_app(
            app=ClientApp(mods=[lambda message, context, call_next: call_next(message, context)])
        ),
        "mods",
    )
