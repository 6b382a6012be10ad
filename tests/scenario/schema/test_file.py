"""Scenario files: every table, every way to write one wrong, overrides, and the resolved document."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import SocflowerError
from socflower.scenario.schema.config import (
    CLUSTER_STRATEGIES,
    FAULT_KINDS,
    CompareConfig,
    DataConfig,
    EventConfig,
    ModelConfig,
    StrategyConfig,
    TrainConfig,
)
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import STRATEGIES
from socflower.strategies.settings import TrainingSchedule
from tests.one_line import last_key, one_line, refused

FULL = """\
# Does it hold?
#   In two lines.

# Not part of the question.
schema = 1
seed = 7
[cluster]
name = "rack"
boards = [2, 3]
device = "jetson-nano"
hub_bytes_per_s = 1e9
[model]
name = "lenet5"
[data]
name = "digits"
partition = "dirichlet"
alpha = 1
[train]
epochs = 4
batch_size = 8
learning_rate = 1
momentum = 0
weight_decay = 0.1
schedule = "constant"
reduction = "always"
reply_timeout_s = 5
[strategy]
name = "ring"
groups = 3
socs = 4
sync_interval_epochs = 1
reshuffle = false
uplink_turns = false
overlap_buckets = 2
tolerate_client_errors = true
[compare]
strategies = ["ring", "sgd"]
target_accuracy = 1
[[event]]
kind = "nan"
soc = 1
round = 2
[[event]]
kind = "die"
soc = 0
round = 1
[expect]
min_accuracy = 0.5
max_energy_j = 10
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str, name: str = "case.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return to_file


def refusal(path: Path, *overrides: str) -> str:
    """Return the one line with which a scenario or its cluster is refused."""
    return refused(lambda: scenario_cluster(load_scenario(path, overrides)), error=SocflowerError)


def test_every_table_is_read(write: Write) -> None:
    assert load_scenario(write(FULL)) == Scenario(
        schema=1,
        seed=7,
        name="case",
        question="Does it hold? In two lines.",
        cluster={"name": "rack", "boards": (2, 3), "device": "jetson-nano", "hub_bytes_per_s": 1e9},
        model=ModelConfig(name="lenet5"),
        data=DataConfig(name="digits", partition="dirichlet", alpha=1.0),
        train=TrainConfig(
            epochs=4,
            batch_size=8,
            learning_rate=1.0,
            momentum=0.0,
            weight_decay=0.1,
            schedule="constant",
            reduction="always",
            reply_timeout_s=5.0,
        ),
        strategy=StrategyConfig(
            name="ring",
            groups=3,
            socs=4,
            sync_interval_epochs=1.0,
            reshuffle=False,
            uplink_turns=False,
            overlap_buckets=2,
            tolerate_client_errors=True,
        ),
        compare=CompareConfig(strategies=("ring", "sgd"), target_accuracy=1.0),
        events=(EventConfig(kind="nan", soc=1, round=2), EventConfig(kind="die", soc=0, round=1)),
        expect={"min_accuracy": 0.5, "max_energy_j": 10},
    )


def test_whole_numbers_become_the_numbers_that_fields_hold(write: Write) -> None:
    loaded = load_scenario(write(FULL))
    assert isinstance(loaded.train.learning_rate, float)
    assert isinstance(loaded.strategy.sync_interval_epochs, float)
    assert isinstance(loaded.strategy.groups, int)


def test_an_empty_file_is_the_defaults(write: Write) -> None:
    loaded = load_scenario(write(""))
    assert loaded == Scenario(name="case")
    assert scenario_cluster(loaded).num_socs == 5


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("# One line.\nseed = 1\n", "One line."),
        ("## Two\n#lines.\n\n# other\nseed = 1\n", "Two lines."),
        ("seed = 1\n# later\n", ""),
        ("\n# after a blank line\n", ""),
        ("", ""),
    ],
)
def test_the_leading_comment_is_the_question(write: Write, text: str, question: str) -> None:
    assert load_scenario(write(text)).question == question


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("sead = 3", "seed"),
        ("[clusters]\nboards = 2", "cluster"),
        ("[cluster]\nbords = 2", "boards"),
        ("[[board]]\nsoc = 2", "socs"),
        ("[model]\nnane = 'lenet5'", "name"),
        ("[data]\npartitions = 'iid'", "partition"),
        ("[train]\nlearning_rat = 0.1", "learning_rate"),
        ("[strategy]\ngroup = 2", "groups"),
        ("[compare]\nstrategy = ['sgd']", "strategies"),
        ("[[event]]\nkind = 'nan'\nsoc = 0\nround = 1\nround_ = 2", "round"),
        ("[expect]\nmin_acuracy = 0.9", "min_accuracy"),
    ],
)
def test_an_unknown_key_is_named_with_its_value_and_what_was_meant(
    write: Write, text: str, meant: str
) -> None:
    says = refusal(write(text))
    key, value = re.findall(r"unknown \w+ '(\w+)' \(value (.*)\)", says)[0]
    assert key in text and value.strip("[]'{}")[:3] in text
    assert f"did you mean {meant!r}?" in says


def test_an_unknown_key_like_no_other_gets_the_list_of_keys(write: Write) -> None:
    assert "factory, arguments, name, partition, alpha" in refusal(write("[data]\nxyz = 1"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema = '1'", "schema = '1' must be 1"),
        ("cluster = 3", "[cluster] must be a table, got 3"),
        ("board = 3", "board = 3 must be written [[board]]"),
        ("board = [3]", "[[board]] 1 must be a table, got 3"),
        ("[event]\nkind = 'nan'", "must be written [[event]]"),
        ("event = ['nan']", "[[event]] 1 must be a table, got 'nan'"),
        ("model = 'lenet5'", "[model] must be a table, got 'lenet5'"),
        ("train = []", "[train] must be a table, got []"),
        ("compare = true", "[compare] must be a table, got True"),
        ("expect = 0.9", "[expect] must be a table, got 0.9"),
        ("[cluster]\nboards = [0, 0]", "no SoC in use"),
        ("[cluster]\nboards = [2]\nsocs_per_board = 2", "socs_per_board"),
        ("[cluster]\ndevice = 'abacus'", "'abacus' is unknown; the catalogue has snapdragon-865"),
        ("[cluster]\nboards = 2\n[[board]]\nsocs = 1", "boards"),
        ("[train]\nepochs = 5\nlocal_epochs = 2", "a multiple of local_epochs = 2"),
        ("[strategy]\nname = 'magic'", "use one of socflow, ring, ps"),
        ("[[event]]\nkind = 'nan'\nround = 1", "[[event]] 1: soc is missing"),
        ("[expect]\naccuracy = 1", "unknown claim 'accuracy'"),
    ],
)
def test_what_is_no_table_or_fits_nothing_else_is_named(write: Write, text: str, says: str) -> None:
    assert says in refusal(write(text))


@pytest.mark.parametrize(
    "text",
    [
        "[compare]\ntarget_accuracy = 'high'",
        "[[event]]\nkind = 'nan'\nround = 1\nsoc = '0'",
        "[cluster]\nboards = 'two'",
        "[cluster]\nhub_bytes_per_s = 'fast'",
        "[expect]\nmin_accuracy = 'high'",
        "schema = 2",
        "seed = true",
        "seed = 1.5",
        "seed = -1",
        "seed = 4294967296",
        "[cluster]\nboards = 0",
        "[model]\nname = 5",
        "[data]\npartition = 'random'",
        "[data]\nalpha = 0",
        "[data]\nalpha = inf",
        "[train]\nepochs = 0",
        "[train]\nepochs = 2.0",
        "[train]\nepochs = true",
        "[train]\nbatch_size = 0",
        "[train]\nlearning_rate = 0",
        "[train]\nlearning_rate = '0.1'",
        "[train]\nlearning_rate = nan",
        "[train]\nreply_timeout_s = inf",
        "[train]\nmomentum = false",
        "[train]\nmomentum = 1",
        "[train]\nmomentum = -0.1",
        "[train]\nweight_decay = nan",
        "[train]\nschedule = 'linear'",
        "[train]\nschedule = 'multi-step'\nmilestones = [3, 2]",
        "[train]\nepochs = 4\nschedule = 'multi-step'\nmilestones = [4]",
        "[train]\nmilestones = [2]",
        "[train]\nschedule = 'constant'\ndecay_factor = 0.5",
        "[train]\nreduction = 'never'",
        "[strategy]\ngroups = 0",
        "[strategy]\ngroups = 2.5",
        "[strategy]\ngroups = 'many'",
        "[strategy]\nsocs = 0",
        "[strategy]\nsocs = 'all'",
        "[strategy]\nsync_interval_epochs = [1]",
        "[strategy]\nsync_interval_epochs = 0",
        "[strategy]\nsync_interval_epochs = 'often'",
        "[strategy]\nreshuffle = 1",
        "[strategy]\noverlap_buckets = 0",
        "[compare]\nstrategies = 'ring'",
        "[compare]\nstrategies = []",
        "[compare]\nstrategies = ['ring', 2]",
        "[compare]\nstrategies = ['ring', 'star']",
        "[[event]]\nsoc = 0\nround = 1\nkind = 'explode'",
        "[[event]]\nkind = 'nan'\nround = 1\nsoc = -1",
        "[[event]]\nkind = 'nan'\nsoc = 0\nround = 0",
    ],
)
def test_a_value_that_its_key_does_not_take_is_named_with_the_key(write: Write, text: str) -> None:
    assert last_key(text) in refusal(write(text))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"seed = 1\n[train\nepochs = 2", "not valid TOML"),
        (b"seed = 1\nseed = 2", "not valid TOML"),
        (b"# caf\xe9\nseed = 1", "UTF-8"),
        (b"\x00\xff\xfe", "UTF-8"),
    ],
)
def test_a_file_that_is_no_scenario_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    one_line(refusal(path), path, says)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    one_line(refusal(tmp_path / "no.toml"), "no.toml", "No such file or directory")
    one_line(refusal(tmp_path), tmp_path)


# ------------------------------------------------------------------------------------------------ overrides
@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("seed=3", lambda s: s.seed, 3),
        ("train.epochs=2", lambda s: s.train.epochs, 2),
        (" train.epochs = 2 ", lambda s: s.train.epochs, 2),
        ("train.learning_rate=1e-3", lambda s: s.train.learning_rate, 1e-3),
        ("strategy.name=sgd", lambda s: s.strategy.name, "sgd"),
        ("strategy.name='sgd'", lambda s: s.strategy.name, "sgd"),
        ("strategy.reshuffle=true", lambda s: s.strategy.reshuffle, True),
        ("strategy.groups=auto", lambda s: s.strategy.groups, "auto"),
        ("cluster.boards=[1, 1, 1]", lambda s: s.cluster.boards, (1, 1, 1)),
        ("compare.strategies=['fedavg']", lambda s: s.compare.strategies, ("fedavg",)),
        ("expect={}", lambda s: s.expect, {}),
        ("expect.min_energy_j=2", lambda s: s.expect["min_energy_j"], 2),
        (
            "event=[{kind='nan', soc=1, round=1}]",
            lambda s: s.events,
            (EventConfig(kind="nan", soc=1, round=1),),
        ),
    ],
)
def test_an_override_sets_one_key(
    write: Write,
    override: str,
    read: Callable[[Scenario], Any],
    value: object,
) -> None:
    assert read(load_scenario(write(FULL), [override])) == value


def test_an_override_makes_the_table_that_is_not_there(write: Write) -> None:
    assert load_scenario(write("seed = 1"), ["train.epochs=3"]).train.epochs == 3


def test_the_last_of_several_overrides_of_a_key_counts(write: Write) -> None:
    assert load_scenario(write(""), ["seed=2", "seed=3"]).seed == 3


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.epochs", "write table.key=value"),
        ("=3", "write table.key=value"),
        ("seed.value=3", "'seed' is not a table"),
        ("event.kind=nan", "'event' is not a table"),
        ("model.name.first=x", "'name' is not a table"),
        ("train.epoch=3", "did you mean 'epochs'?"),
        ("train.epochs=three", "epochs = 'three'"),
        ("train.epochs=", "epochs = ''"),
        ("expect=3", "[expect] must be a table"),
    ],
)
def test_an_override_that_cannot_be_is_named(write: Write, override: str, says: str) -> None:
    assert says in refusal(write(FULL), override)


# -------------------------------------------------------------------------------------------------- clusters
def test_a_cluster_file_is_found_beside_the_scenario_and_resolved(write: Write) -> None:
    write(
        "[cluster]\nname = 'shelf'\n"
        "[[board]]\nsocs = 2\ndevice = 'raspberry-pi-4b'\n[[board]]\nsocs = 1\ncount = 2\n",
        "shelf.toml",
    )
    loaded = load_scenario(write("cluster = 'shelf.toml'"))
    cluster = scenario_cluster(loaded)
    assert cluster.name == "shelf"
    assert cluster.slots_per_board == (2, 1, 1)
    assert cluster.device_of(0).name == "raspberry-pi-4b"
    assert cluster.device_of(3).name == "snapdragon-865"
    assert scenario_cluster(from_document(to_document(loaded))) == cluster


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "shelf.toml: cannot be read"),
        ("[cluster", "shelf.toml: not valid TOML"),
        ("[train]\nepochs = 1", "unknown key 'train'"),
        ("[cluster]\nboards = -1", "boards = -1 must be a whole number"),
    ],
)
def test_a_cluster_file_that_cannot_be_is_named(
    write: Write, content: str | None, says: str
) -> None:
    if content is not None:
        write(content, "shelf.toml")
    assert says in refusal(write("cluster = 'shelf.toml'"))


def test_board_tables_make_a_mixed_rack(write: Write) -> None:
    cluster = scenario_cluster(
        load_scenario(
            write(
                "[cluster]\ndevice = 'jetson-nano'\nsoc_bytes_per_s = 5\n[[board]]\nsocs = 3\n"
                "[[board]]\nsocs = 1\ndevice = 'snapdragon-865'\n"
            )
        )
    )
    assert [board.device.name for board in cluster.boards] == ["jetson-nano", "snapdragon-865"]
    assert [board.soc_bytes_per_s for board in cluster.boards] == [5.0, 5.0]


# ------------------------------------------------------------------------------------- the resolved document
positive = st.floats(1e-6, 1e6)
trains = st.builds(
    TrainConfig,
    epochs=st.integers(1, 9),
    batch_size=st.integers(1, 999),
    learning_rate=positive,
    momentum=st.floats(0, 0.99),
    weight_decay=st.floats(0, 1),
    schedule=st.sampled_from(("cosine", "constant")),
    reduction=st.sampled_from(("auto", "always")),
    reply_timeout_s=positive,
)
scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 2**32 - 1),
    name=st.text(),
    question=st.text(),
    cluster=st.fixed_dictionaries(
        {},
        optional={
            "name": st.text(),
            "socs_per_board": st.integers(1, 9),
            "boards": st.integers(1, 9),
            "hub_bytes_per_s": st.floats(1.0, 1e6),
        },
    ),
    model=st.builds(ModelConfig, name=st.text()),
    data=st.builds(DataConfig, name=st.text())
    | st.builds(DataConfig, name=st.text(), partition=st.just("dirichlet"), alpha=positive),
    train=trains,
    strategy=st.builds(
        StrategyConfig,
        name=st.sampled_from(CLUSTER_STRATEGIES),
        groups=st.integers(1, 99) | st.just("auto"),
        socs=st.none() | st.integers(1, 99),
        sync_interval_epochs=positive | st.just("decay"),
        reshuffle=st.booleans(),
        uplink_turns=st.booleans() | st.just("auto"),
        overlap_buckets=st.integers(1, 9),
        tolerate_client_errors=st.booleans(),
    ),
    compare=st.builds(
        CompareConfig,
        target_accuracy=st.none() | st.floats(0, 1),
        strategies=st.lists(st.sampled_from(CLUSTER_STRATEGIES), min_size=1).map(tuple),
    ),
    events=st.lists(
        st.builds(
            EventConfig,
            kind=st.sampled_from(FAULT_KINDS),
            soc=st.integers(0, 99),
            round=st.integers(1, 99),
        )
    ).map(tuple),
    expect=st.dictionaries(
        st.sampled_from(("min_accuracy", "max_events", "min_speedup_over_ring")),
        st.integers(0, 9) | st.floats(0, 9),
    ),
)


@given(scenarios)
def test_the_resolved_document_is_the_scenario(scenario: Scenario) -> None:
    """Through JSON, as result.json and the run folder carry it."""
    assert from_document(json.loads(json.dumps(to_document(scenario)))) == scenario


def test_the_resolved_document_has_every_default(write: Write) -> None:
    document = to_document(load_scenario(write("")))
    assert document["train"]["epochs"] == TrainConfig().epochs
    assert document["strategy"]["name"] == "socflow"
    assert document["compare"]["strategies"] == list(CLUSTER_STRATEGIES)
    assert "socs" not in document["strategy"]  # absent means all: JSON null would not be TOML


@pytest.mark.parametrize(
    "text",
    [
        "train = 2020-01-01",
        "model = 10:00:00",
        "board = [2020-01-01]",
        "device = 2020-01-01",
        "event = [2020-01-01T00:00:00]",
        "[device]\nx = 2020-01-01",
    ],
)
def test_a_date_in_place_of_a_table_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "dated.toml"
    path.write_text(f"schema = 1\n{text}\n")
    line = refusal(path)
    assert "2020-01-01" in line or "10:00:00" in line or "2020, 1, 1" in line


def test_doubling_is_for_methods_whose_interval_decays_and_stays_with_them() -> None:
    def at(**strategy: Any) -> Scenario:
        return Scenario(strategy=StrategyConfig(groups=2, **strategy))

    for name, kind in STRATEGIES.items():
        own = {"name": name, "groups": "auto", "doubling_epochs": 3}
        if "doubling_epochs" in kind.unread_keys:
            refused(
                lambda own=own: at().replaced(strategy=StrategyConfig(**own)), "doubling_epochs = 3"
            )
    decaying = at(doubling_epochs=3)
    assert decaying.under("local-sgd").strategy.doubling_epochs == 3
    assert decaying.under("ring").strategy.doubling_epochs == 10
    assert decaying.under("fedavg").strategy.doubling_epochs == 10
    assert decaying.under("socflow", {"sync_interval_epochs": 1.0}).strategy.doubling_epochs == 10


@pytest.mark.parametrize("target", ["95", "-0.1"])
def test_a_target_accuracy_is_a_part_of_one(target: str, write: Write) -> None:
    text = f"[compare]\ntarget_accuracy = {target}"
    one_line(refusal(write(text)), last_key(text))


def test_doubling_of_a_constant_interval_is_refused(write: Write) -> None:
    text = "[strategy]\nsync_interval_epochs = 1\ndoubling_epochs = 3"
    one_line(refusal(write(text)), last_key(text), "'decay'")
    ring = "[strategy]\ngroups = 2\n[compare.train.ring]\ndoubling_epochs = 3"
    one_line(refusal(write(ring)), last_key(ring), "ring does not read it")
    refused(
        lambda: TrainingSchedule(
            num_samples=8, batch_size=2, num_epochs=4, interval_epochs=1, doubling_epochs=3
        ),
        "doubling_epochs = 3",
        "'decay'",
    )


def test_local_epochs_are_for_methods_that_read_them_and_stay_with_them() -> None:
    local = TrainConfig(epochs=4, local_epochs=2)
    refused(
        lambda: Scenario().replaced(train=local), "[train] local_epochs = 2", "does not read it"
    )
    federated = Scenario(train=local, strategy=StrategyConfig(name="fedavg"))
    assert federated.under("tree-fedavg").train.local_epochs == 2
    assert federated.under("ring").train.local_epochs == 1
