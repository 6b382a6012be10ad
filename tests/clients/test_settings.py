"""An unknown setting is refused by name, in messages and in node configs; known ones are accepted."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedProx,
    Strategy,
)
from hypothesis import given
from hypothesis import strategies as st

from socflower.clients.app import make_client_app
from socflower.clients.heat_mod import heat_mod, node_heat_mod
from socflower.clients.settings import STANDALONE_KEYS, ReadSettings
from socflower.clients.split.app import make_split_client_app
from socflower.cluster import parse_cluster
from socflower.engines.local.grid import LocalGrid
from socflower.engines.local.run_app import run_app
from socflower.errors import ConfigError, TrainingFailed
from socflower.flower_adapter import begin_run
from socflower.strategies.baselines import OrderedFedAvg
from socflower.strategies.methods.local import LocalSchedule
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.strategies.split_replay import SplitReplay
from socflower.training.int8 import Int8Trainer
from socflower.wire.message_keys import PRICED, RESUMED, SERVER_ROUND, WARM_UP
from tests.clients.split.models import (
    BATCHES_PER_EPOCH,
    ThreadGrid,
    layered,
    parties_of,
    samples_of,
)
from tests.clients.test_app import (
    DATA,
    TRAINER,
    fresh,
    group_task,
    make_app,
    message,
    node,
    part,
    weights,
)
from tests.one_line import refused

OF_STRATEGIES = (SERVER_ROUND, PRICED, RESUMED, WARM_UP)
KINDS = ("alone", "group", "evaluate")


def asked(kind: str, **config: object) -> Message:
    """Return a message without a model, which a check does not look at."""
    begin_run(1)
    content = RecordDict({"config": ConfigRecord(config)})  # type: ignore[arg-type]
    if kind == "group":
        content["group"] = ConfigRecord(group_task().encode())
    return Message(content, 5, "evaluate" if kind == "evaluate" else "train")


def check(read: ReadSettings, sent: Message) -> None:
    if sent.metadata.message_type == "evaluate":
        read.check_evaluation(sent)
    else:
        read.check_training(sent)


# -------------------------------------------------------------------------------------------------- of a message
@pytest.mark.parametrize("kind", KINDS)
@given(key=st.text("abz-_", min_size=1, max_size=12))
def test_a_key_is_refused_unless_it_is_declared(kind: str, key: str) -> None:
    sent = asked(kind, **{key: 0.5})
    with pytest.raises(ConfigError) as caught:
        check(ReadSettings(maker="make_client_app"), sent)
    what = "evaluate config" if kind == "evaluate" else "train config"
    assert str(caught.value).startswith(f"{what}: {key!r} is not used")
    assert f"make_client_app(…, extra_keys=[{key!r}])" in str(caught.value)
    assert "\n" not in str(caught.value)
    check(ReadSettings(maker="make_client_app", extra_keys=[key]), sent)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_let_through_where_it_is_read(kind: str) -> None:
    read = ReadSettings(maker="make_client_app")
    check(read, asked(kind, **dict.fromkeys(OF_STRATEGIES, 1)))
    for key in STANDALONE_KEYS:
        if kind == "alone":
            check(read, asked(kind, **{key: 2}))
        else:
            with pytest.raises(ConfigError, match=f"'{key}' is not used"):
                check(read, asked(kind, **{key: 2}))


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("alone", "batch_size", "batch-size"),
        ("alone", "Local-Epochs", "local-epochs"),
        ("alone", "lr", "FP32Trainer"),
        ("group", "proximal-mu", "for clients that train alone"),
        ("alone", "steps", "local-epochs"),
        (
            "group",
            "batch-size",
            "a group's batch size, epochs and seed are arguments of its strategy",
        ),
        ("group", "clipping_norm", "adaptiveclipping_mod"),
        ("evaluate", "batch-size", "this client reads none when it evaluates"),
    ],
)
def test_the_refusal_says_what_to_do_instead(kind: str, key: str, words: str) -> None:
    refused(lambda: make_app(evaluate_data_fn=part)(asked(kind, **{key: 5}), node(2)), words)


def test_a_member_of_a_ring_refuses_too() -> None:
    """Before it opens its port, or is refused for having none."""
    sent = message(group=group_task(), lr=5)
    sent.content["ring"] = ConfigRecord({})
    refused(lambda: make_app()(sent, node(2)), "lr")


def test_a_record_of_another_name_is_not_passed_over() -> None:
    """As of a strategy with keys of its own, or one whose control variates nobody would add."""
    for record in (ConfigRecord({"batch-size": 4}), ArrayRecord(), MetricRecord({"a": 1})):
        sent = message()
        sent.content["settings"] = record
        with pytest.raises(
            ConfigError, match=r"its record 'settings' is not used.*configrecord_key"
        ):
            make_app()(sent, node(2))
        ReadSettings(maker="make_client_app", extra_keys=["settings"]).check_training(sent)


def test_an_edges_part_of_a_split_training_is_refused_by_other_clients() -> None:
    sent = message()
    sent.content["split"] = ConfigRecord({})
    refused(lambda: make_app()(sent, node(2)), "make_split_client_app")


def test_names_of_keys_come_in_a_list() -> None:
    for wrong in ("lr", [3]):
        with pytest.raises(ConfigError, match=r"extra_keys = .* must be a list of names"):
            make_client_app(lambda context: fresh(), part, TRAINER, extra_keys=wrong)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- whole trainings
def train(strategy: Strategy, app: ClientApp, **settings: Any) -> Any:
    with LocalGrid(app, 2, num_workers=0) as grid:
        return strategy.start(grid, weights(fresh()), num_rounds=1, **settings)


def first_cause(strategy: Strategy, app: ClientApp, **settings: Any) -> str:
    """Return why a training of one round ended, or what its clients answered where the strategy passes errors over."""
    causes: list[str] = []

    def watch(sent: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            return call_next(sent, context)
        except ConfigError as error:
            causes.append(str(error))
            raise

    watched = watch_with(app, watch)
    try:
        train(strategy, watched, **settings)
    except TrainingFailed as error:
        assert causes and causes[0] in str(error)
    return causes[0]


def watch_with(
    app: ClientApp, watch: Callable[[Message, Context, ClientAppCallable], Message]
) -> ClientApp:
    class Watched(ClientApp):
        def __call__(self, sent: Message, context: Context) -> Message:
            return watch(sent, context, app)

    return Watched()


def test_fedprox_keeps_clients_near_the_weights_they_got() -> None:
    def moved(proximal_mu: float) -> float:
        found = train(
            FedProx(fraction_evaluate=0.0, proximal_mu=proximal_mu),
            make_app(),
            train_config=ConfigRecord({"local-epochs": 5}),
        )
        received = weights(fresh())
        return sum(
            float(np.square(array.numpy() - received[name].numpy()).sum())
            for name, array in found.arrays.items()
        )

    free, near, held = moved(0.0), moved(0.5), moved(4.0)
    assert held < near < free


def test_a_run_of_fedprox_with_a_trainer_without_its_term_ends_with_the_refusal() -> None:
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        FedProx(fraction_evaluate=0.0, proximal_mu=1000.0).start(
            grid, weights(fresh()), num_rounds=1
        )

    refused(
        lambda: run_app(
            server_app,
            make_app(trainer=Int8Trainer()),
            cluster=parse_cluster({"boards": [2]}),
            num_workers=0,
        ),
        "no client succeeded",
        "proximal term",
        error=TrainingFailed,
    )


def local(**settings: Any) -> OrderedFedAvg:
    return OrderedFedAvg(
        schedule=LocalSchedule(num_rounds=1),
        num_socs=2,
        tolerate_client_errors=True,
        **settings,
    )


SCHEDULE = TrainingSchedule(num_samples=len(DATA), batch_size=16, num_epochs=1, interval_epochs=1)


def test_socflow_ends_with_the_refusal_of_its_clients() -> None:
    strategy = SoCFlow(cluster=parse_cluster({"boards": [2]}), schedule=SCHEDULE)
    refused(
        lambda: train(strategy, make_app(), train_config=ConfigRecord({"lr": 5})),
        "ConfigError",
        "lr",
        "client raised",
        error=TrainingFailed,
    )
    train(strategy, make_app(extra_keys=["lr"]), train_config=ConfigRecord({"lr": 5}))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: SoCFlow(cluster=parse_cluster({"boards": [2]}), schedule=SCHEDULE),
        lambda: local(),
        lambda: SplitReplay(
            cluster=parse_cluster({"boards": [1]}),
            parties=parties_of(layered(), 1, cut=0),
            edge_names=layered().edge_names,
            batches_per_epoch=1,
            num_epochs=1,
        ),
    ],
    ids=["SoCFlow", "OrderedFedAvg", "SplitReplay"],
)
def test_a_strategy_that_asks_nobody_to_evaluate_refuses_settings_for_it(
    strategy: Callable[[], Strategy],
) -> None:
    made = strategy()
    refusal = rf"{type(made).__name__}: evaluate_config \(batch-size\) is not used"
    with pytest.raises(ConfigError, match=refusal):
        made.configure_evaluate(1, ArrayRecord(), ConfigRecord({"batch-size": 4}), None)  # type: ignore[arg-type]


def test_they_are_refused_around_socflow_too() -> None:
    """A strategy around it starts the rounds itself, and hands the settings on after the first."""
    strategy = SoCFlow(cluster=parse_cluster({"boards": [2]}), schedule=SCHEDULE)
    private = DifferentialPrivacyServerSideFixedClipping(strategy, 0.0, 1e6, 1)
    refused(
        lambda: train(private, make_app(), evaluate_config=ConfigRecord({"batch-size": 4})),
        "SoCFlow",
        "evaluate_config",
        "batch-size",
    )


def test_a_strategy_that_evaluates_sends_its_settings_and_its_clients_refuse_them() -> None:
    fedavg = local(outer=FedAvg(fraction_evaluate=1.0))
    cause = first_cause(
        fedavg, make_app(evaluate_data_fn=part), evaluate_config=ConfigRecord({"batch-size": 4})
    )
    assert cause.startswith("evaluate config: 'batch-size' is not used")
    result = train(local(outer=FedAvg(fraction_evaluate=1.0)), make_app(evaluate_data_fn=part))
    assert "accuracy" in result.evaluate_metrics_clientapp[1]


def test_client_side_privacy_needs_its_mod() -> None:
    """Its wrapper adds noise for updates that are clipped; without the mod they are not."""

    def private() -> Strategy:
        return DifferentialPrivacyClientSideFixedClipping(
            FedAvg(fraction_evaluate=0.0),
            noise_multiplier=0.0,
            clipping_norm=0.1,
            num_sampled_clients=2,
        )

    assert "'clipping_norm' is not used" in first_cause(private(), make_app())
    assert train(private(), make_app(mods=[fixedclipping_mod])).arrays is not None
    assert ReadSettings(maker="", mods=[adaptiveclipping_mod]).declared == {"clipping_norm"}


def test_edges_refuse_what_they_do_not_read() -> None:
    program = layered()

    def train_split(**settings: Any) -> None:
        app = make_split_client_app(
            lambda context: program,
            lambda context, party, num_parties: samples_of(program, party),
            **settings,
        )
        strategy = SplitReplay(
            cluster=parse_cluster({"boards": [1]}),
            parties=parties_of(program, 1, cut=0),
            num_epochs=1,
            edge_names=program.edge_names,
            batches_per_epoch=BATCHES_PER_EPOCH,
            fingerprint=program.fingerprint(),
        )
        strategy.start(
            ThreadGrid([app]),
            ArrayRecord(program.model().state_dict()),  # type: ignore[arg-type]
            num_rounds=1,
            timeout=60,
            train_config=ConfigRecord({"lr": 5}),
        )

    refused(train_split, "lr", "SplitReplay", "make_split_client_app", error=TrainingFailed)
    train_split(extra_keys=["lr"])


# ------------------------------------------------------------------------------------------------ of a node config
def configured(**config: object) -> Context:
    context = node()
    context.node_config.update(config)  # type: ignore[arg-type]
    return context


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("ring_adress", "ring or ring-bind"),
        ("ring-adress", "ring-certificate"),
        ("rings", "ring"),
        ("Board", "board"),
        ("slots", "slot"),
        ("ring_trusted", "ring-trusted"),
        ("num_partition", "num-partitions"),
        ("cloud_ca", "cloud-ca"),
        ("heat_pause_c", "heat-pause-c"),
        ("prempt-file", "preempt-file"),
        ("preempt-files", "preempt-file"),
    ],
)
def test_a_misspelled_key_is_refused_with_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_app()(message(), configured(**{key: "x"}))
    assert str(caught.value).startswith(
        f"node 5: its node config has {key}, which is not used; did you mean "
    )
    assert meant in str(caught.value)
    ReadSettings(maker="make_client_app", extra_keys=[key]).check_node(configured(**{key: "x"}))


@pytest.mark.parametrize("key", ["data-path", "name", "rank", "camera", "model"])
def test_keys_of_the_apps_own_are_let_through(key: str) -> None:
    ReadSettings(maker="make_client_app").check_node(configured(**{key: "x"}))


def test_a_node_that_minds_heat_needs_an_app_that_does() -> None:
    refused(lambda: make_app()(message(), configured(heat=True)), "node_heat_mod")
    make_app()(message(), configured(heat=False))
    ReadSettings(maker="", mods=[node_heat_mod]).check_node(configured(heat=True))
    ReadSettings(maker="", mods=[heat_mod()], extra_keys=["heat"]).check_node(configured(heat=True))


def test_messages_that_carry_nothing_are_fine() -> None:
    ReadSettings(maker="").check_training(Message(RecordDict(), 5, "train"))
