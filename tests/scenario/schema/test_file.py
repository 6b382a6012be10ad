"""Scenario files: every table, every way to write one wrong, overrides, and the resolved document."""

import json
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
    Scenario,
    StrategyConfig,
    TrainConfig,
)
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)

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
local_epochs = 2
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
    with pytest.raises(SocflowerError) as caught:
        scenario_cluster(load_scenario(path, overrides))
    text = str(caught.value)
    assert text and "\n" not in text
    return text


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
            local_epochs=2,
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
    ("text", "key", "value", "meant"),
    [
        ("sead = 3", "sead", "3", "seed"),
        ("[clusters]\nboards = 2", "clusters", "{'boards': 2}", "cluster"),
        ("[cluster]\nbords = 2", "bords", "2", "boards"),
        ("[[board]]\nsoc = 2", "soc", "2", "socs"),
        ("[model]\nnane = 'lenet5'", "nane", "'lenet5'", "name"),
        ("[data]\npartitions = 'iid'", "partitions", "'iid'", "partition"),
        ("[train]\nlearning_rat = 0.1", "learning_rat", "0.1", "learning_rate"),
        ("[strategy]\ngroup = 2", "group", "2", "groups"),
        ("[compare]\nstrategy = ['sgd']", "strategy", "['sgd']", "strategies"),
        ("[[event]]\nkind = 'nan'\nsoc = 0\nround = 1\nround_ = 2", "round_", "2", "round"),
        ("[expect]\nmin_acuracy = 0.9", "min_acuracy", "0.9", "min_accuracy"),
    ],
)
def test_an_unknown_key_is_named_with_its_value_and_what_was_meant(
    write: Write,
    text: str,
    key: str,
    value: str,
    meant: str,
) -> None:
    says = refusal(write(text))
    assert (
        f"unknown key {key!r} (value {value})" in says
        or f"unknown claim {key!r} (value {value})" in says
    )
    assert f"did you mean {meant!r}?" in says


def test_an_unknown_key_like_no_other_gets_the_list_of_keys(write: Write) -> None:
    assert "known keys: factory, arguments, name, partition, alpha" in refusal(
        write("[data]\nxyz = 1")
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema = '1'", "schema = '1' must be 1"),
        ("seed = true", "seed = True must be a whole number"),
        ("seed = 1.5", "seed = 1.5 must be a whole number"),
        ("cluster = 3", "[cluster] must be a table, got 3"),
        ("board = 3", "board = 3 must be written [[board]], a list of tables"),
        ("board = [3]", "[[board]] 1 must be a table, got 3"),
        ("[event]\nkind = 'nan'", "must be written [[event]], a list of tables"),
        ("event = ['nan']", "[[event]] 1 must be a table, got 'nan'"),
        ("model = 'lenet5'", "[model] must be a table, got 'lenet5'"),
        ("data = 1", "[data] must be a table, got 1"),
        ("train = []", "[train] must be a table, got []"),
        ("strategy = 'ring'", "[strategy] must be a table, got 'ring'"),
        ("compare = true", "[compare] must be a table, got True"),
        ("expect = 0.9", "[expect] must be a table, got 0.9"),
        ("[model]\nname = 5", "[model] name = 5 must be a text"),
        ("[train]\nepochs = 2.0", "[train] epochs = 2.0 must be a whole number"),
        ("[train]\nepochs = true", "[train] epochs = True must be a whole number"),
        ("[train]\nlearning_rate = '0.1'", "[train] learning_rate = '0.1' must be a number"),
        ("[train]\nmomentum = false", "[train] momentum = False must be a number"),
        ("[strategy]\ngroups = 2.5", "[strategy] groups = 2.5 must be a whole number above 0"),
        (
            "[strategy]\nsync_interval_epochs = [1]",
            "sync_interval_epochs = [1] must be a number above 0",
        ),
        ("[strategy]\nsocs = 'all'", "[strategy] socs = 'all' must be a whole number"),
        ("[strategy]\nreshuffle = 1", "[strategy] reshuffle = 1 must be true or false"),
        ("[compare]\nstrategies = 'ring'", "[compare] strategies = 'ring' must be a list"),
        (
            "[compare]\nstrategies = ['ring', 2]",
            "[compare] strategies = ['ring', 2] must be a list of names out of",
        ),
        (
            "[compare]\ntarget_accuracy = 'high'",
            "[compare] target_accuracy = 'high' must be a number",
        ),
        (
            "[[event]]\nkind = 'nan'\nsoc = '0'\nround = 1",
            "[[event]] 1 soc = '0' must be a whole number",
        ),
        (
            "[cluster]\nboards = 'two'",
            "boards = 'two' must be a whole number of 1 or more or a list",
        ),
        (
            "[cluster]\nhub_bytes_per_s = 'fast'",
            "hub_bytes_per_s = 'fast' must be a number of 1 or more",
        ),
        ("[expect]\nmin_accuracy = 'high'", "[expect] min_accuracy = 'high' must be a number"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(write: Write, text: str, says: str) -> None:
    assert says in refusal(write(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema = 2", "schema = 2 must be 1"),
        ("seed = -1", "seed = -1 must be a whole number from 0 to 4294967295"),
        (
            "seed = 99999999999999999999",
            "seed = 99999999999999999999 must be a whole number from 0 to",
        ),
        ("[cluster]\nboards = 0", "boards = 0 must be a whole number of 1 or more or a list"),
        ("[cluster]\nboards = [0, 0]", "has no SoC in use"),
        ("[cluster]\nboards = [2]\nsocs_per_board = 2", "drop socs_per_board"),
        (
            "[cluster]\ndevice = 'abacus'",
            "device 'abacus' is unknown; the catalogue has snapdragon-865",
        ),
        ("[cluster]\nboards = 2\n[[board]]\nsocs = 1", "are both given; keep one"),
        (
            "[data]\npartition = 'random'",
            "partition = 'random' is unknown; use one of iid, dirichlet",
        ),
        ("[data]\nalpha = 0", "[data] alpha = 0 must be a number above 0"),
        ("[data]\nalpha = inf", "[data] alpha = inf must be a number above 0 and finite"),
        (
            "[train]\nepochs = 0",
            "[train] epochs = 0 must be a whole number above 0 and at most 1000000",
        ),
        (
            "[train]\nbatch_size = -8",
            "[train] batch_size = -8 must be a whole number above 0 and at most 1000000",
        ),
        (
            "[train]\nlearning_rate = nan",
            "[train] learning_rate = nan must be a number above 0 and finite",
        ),
        (
            "[train]\nreply_timeout_s = inf",
            "[train] reply_timeout_s = inf must be a number above 0 and at most 10000000",
        ),
        ("[train]\nmomentum = 1", "[train] momentum = 1 must be a number of 0 or more and below 1"),
        (
            "[train]\nweight_decay = nan",
            "weight_decay = nan must be a number of 0 or more and finite",
        ),
        (
            "[train]\nschedule = 'linear'",
            "schedule = 'linear' is unknown; use one of cosine, constant",
        ),
        ("[train]\nreduction = 'never'", "reduction = 'never' is unknown"),
        (
            "[train]\nepochs = 5\nlocal_epochs = 2",
            "epochs = 5 must be a multiple of local_epochs = 2",
        ),
        (
            "[strategy]\nname = 'magic'",
            "name = 'magic' is unknown; use one of socflow, ring, fedavg, sgd",
        ),
        ("[strategy]\ngroups = 0", "[strategy] groups = 0 must be a whole number above 0"),
        (
            "[strategy]\ngroups = 'many'",
            "groups = 'many' must be a whole number above 0 and at most 20000 or \"auto\"",
        ),
        ("[strategy]\nsocs = 0", "[strategy] socs = 0 must be a whole number above 0"),
        (
            "[strategy]\nsync_interval_epochs = -1",
            "sync_interval_epochs = -1 must be a number above 0",
        ),
        (
            "[strategy]\nsync_interval_epochs = 'often'",
            "sync_interval_epochs = 'often' must be a number above 0",
        ),
        (
            "[strategy]\noverlap_buckets = 0",
            "overlap_buckets = 0 must be a whole number above 0 and at most 1000",
        ),
        (
            "[compare]\nstrategies = []",
            "[compare] strategies = [] must be a list of names out of socflow, ring",
        ),
        (
            "[compare]\nstrategies = ['ring', 'star']",
            "strategies = ['ring', 'star'] must be a list of names out of",
        ),
        (
            "[[event]]\nkind = 'explode'\nsoc = 0\nround = 1",
            "kind = 'explode' is unknown; use one of raise, nan",
        ),
        (
            "[[event]]\nkind = 'nan'\nsoc = -1\nround = 1",
            "soc = -1 must be a whole number of 0 or more",
        ),
        ("[[event]]\nkind = 'nan'\nsoc = 0\nround = 0", "round = 0 must be a whole number above 0"),
        ("[[event]]\nkind = 'nan'\nround = 1", "[[event]] 1: soc is missing"),
        ("[expect]\naccuracy = 1", "unknown claim 'accuracy'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(write: Write, text: str, says: str) -> None:
    assert says in refusal(write(text))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"seed = 1\n[train\nepochs = 2", "not valid TOML"),
        (b"seed = 1\nseed = 2", "not valid TOML"),
        (b"# caf\xe9\nseed = 1", "is not UTF-8 text"),
        (b"\x00\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_scenario_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    text = refusal(path)
    assert says in text and str(path) in text


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert "no.toml: cannot be read (No such file or directory)" in refusal(tmp_path / "no.toml")
    assert str(tmp_path) in refusal(tmp_path)


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
        ("train.epochs=three", "epochs = 'three' must be a whole number"),
        ("train.epochs=", "epochs = '' must be a whole number"),
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
                "[[board]]\nsocs = 1\ndevice = 'snapdragon-865'\nsoc_bytes_per_s = 7\nboard_bytes_per_s = 9\n"
            )
        )
    )
    assert [board.device.name for board in cluster.boards] == ["jetson-nano", "snapdragon-865"]
    assert [board.soc_bytes_per_s for board in cluster.boards] == [5.0, 7.0]
    assert cluster.boards[1].uplink_bytes_per_s == 9.0


# ------------------------------------------------------------------------------------- the resolved document
positive = st.floats(1e-6, 1e6)
trains = st.integers(1, 5).flatmap(
    lambda local: st.builds(
        TrainConfig,
        local_epochs=st.just(local),
        epochs=st.integers(1, 9).map(lambda n: n * local),
        batch_size=st.integers(1, 999),
        learning_rate=positive,
        momentum=st.floats(0, 0.99),
        weight_decay=st.floats(0, 1),
        schedule=st.sampled_from(("cosine", "constant")),
        reduction=st.sampled_from(("auto", "always")),
        reply_timeout_s=positive,
    )
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
