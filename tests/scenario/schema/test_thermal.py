"""`[thermal]`, `[background_load]`, re-balancing in scenario files: what is read, and every way to get it wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.errors import SocflowerError
from socflower.scenario.heat import planned_load, rack_dynamics
from socflower.scenario.planning import rebalancing
from socflower.scenario.prepared_run import prepare
from socflower.scenario.schema.config import REBALANCE, StrategyConfig
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.schema.thermal import (
    FAN_POLICIES,
    GAMES,
    BackgroundLoadConfig,
    ThermalConfig,
)
from socflower.thermal.model.background_load import Tide
from socflower.thermal.model.rack import Rack
from tests.one_line import last_key, one_line, refused

Write = Callable[[str], Path]

FULL = """\
[strategy]
rebalance = "shares"
rebalance_steps = 3
[thermal]
fan = "passive"
rpm = 2000
high_rpm = 9000
hot_c = 36
cool_c = 33.0
ambient_c = [[0, 20], [600, 30], [60, 25.5]]
fans_working_changes = [[900, 0.5]]
start_c = 22
hot_boards = { 1 = 0.3 }
spread = 0.2
[background_load]
games = "tidal"
start_hour = 18
low = 0.1
high = 0.5
mean_session_s = 1200
takes_soc = true
idle_windows = [[1, 6], [22.5, 23]]
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str) -> Path:
        path = tmp_path / "case.toml"
        path.write_text(text, "utf-8")
        return path

    return to_file


def refusal(path: Path) -> str:
    """Return the one line with which a scenario is refused before it runs."""
    return refused(lambda: prepare(load_scenario(path), "local"), error=SocflowerError)


def test_every_key_is_read(write: Write) -> None:
    loaded = load_scenario(write(FULL))
    thermal = ThermalConfig(
        fan="passive",
        rpm=2000.0,
        high_rpm=9000.0,
        hot_c=36.0,
        cool_c=33.0,
        ambient_c=((0.0, 20.0), (600.0, 30.0), (60.0, 25.5)),
        fans_working_changes=((900.0, 0.5),),
        start_c=22.0,
        hot_boards={1: 0.3},
        spread=0.2,
    )
    users = BackgroundLoadConfig(
        games="tidal",
        start_hour=18.0,
        low=0.1,
        high=0.5,
        mean_session_s=1200.0,
        takes_soc=True,
        idle_windows=((1.0, 6.0), (22.5, 23.0)),
    )
    assert (loaded.thermal, loaded.background_load) == (thermal, users)
    assert (loaded.strategy.rebalance, loaded.strategy.rebalance_steps) == ("shares", 3)
    # None of the values above is a default: a key that was not read would show.
    for config, default in ((thermal, ThermalConfig()), (users, BackgroundLoadConfig())):
        assert all(
            getattr(config, key) != getattr(default, key)
            for key in type(config).model_fields
            if key not in ("max_slowdown", "objective")
        )  # of another policy
    text = (
        "[thermal]\nfan = 'predictive'\nmax_slowdown = 0.1\nhigh_rpm = 9000.0\n"
        "ambient_c = [[10, 30], [0, 22]]"
    )
    loaded = load_scenario(write(text))
    predictive = loaded.thermal
    assert predictive is not None and predictive.first_ambient_c == 22.0
    assert rack_dynamics(loaded, scenario_cluster(loaded)) is not None
    assert (predictive.max_slowdown, predictive.high_rpm) == (0.1, 9000.0)
    chosen = load_scenario(write("[thermal]\nfan = 'objective'\nobjective = 'energy'\n")).thermal
    assert chosen is not None and chosen.objective == "energy"


def test_games_that_are_off_may_keep_their_settings(write: Write) -> None:
    loaded = load_scenario(
        write("[background_load]\nlow = 0.1\ntakes_soc = true\nidle_windows = [[1, 4]]")
    )
    users = loaded.background_load
    assert users is not None and users.games == "none" and users.takes_soc


def test_without_the_tables_nothing_gets_hot_and_nobody_comes(write: Write) -> None:
    loaded = load_scenario(write("seed = 1"))
    assert loaded.thermal is None and loaded.background_load is None
    assert rack_dynamics(loaded, scenario_cluster(loaded)) is None
    assert rebalancing(loaded) is None


def test_a_recorded_load_travels_in_the_resolved_document(tmp_path: Path) -> None:
    """And each SoC's games are those of the file's hours, from the hour at which training begins."""
    (tmp_path / "night.csv").write_text("hour,part_busy\n0,0.5\n1,0.25\n2,0\n")
    (tmp_path / "case.toml").write_text('[background_load]\ngames = "night.csv"\nstart_hour = 1\n')
    loaded = load_scenario(tmp_path / "case.toml")
    (tmp_path / "night.csv").unlink()
    users = from_document(to_document(loaded)).background_load
    assert users is not None and users.games == (0.5, 0.25, 0.0)
    assert users.tide.loads(4, 1e4, 1.0, seed=3) == Tide(recorded=(0.5, 0.25, 0.0)).loads(
        4, 1e4, 1.0, seed=3
    )
    assert rack_dynamics(loaded, scenario_cluster(loaded)) is not None


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ('games = "missing.csv"', ("missing.csv", "cannot be read")),
        ('games = "broken.csv"', ("broken.csv line 2", "part_busy = 2")),
        ("games = []", ("games = []", "each hour")),
        ("games = [0.1, 1.0]", ("games", "1.0")),
        ("games = [0.1]\nhigh = 0.5", ("high = 0.5", "'tidal'")),
    ],
)
def test_recorded_loads_that_cannot_be_are_one_line(
    tmp_path: Path, table: str, named: tuple[str, ...]
) -> None:
    (tmp_path / "broken.csv").write_text("hour,part_busy\n0,2\n")
    (tmp_path / "case.toml").write_text(f"[background_load]\n{table}\n")
    one_line(refusal(tmp_path / "case.toml"), *named)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("thermal = 1", "[thermal] must be a table, got 1"),
        ("background_load = []", "[background_load] must be a table, got []"),
        ("[thermal]\nfans = 1", "unknown key 'fans'"),
        ("[background_load]\ngame = 'tidal'", "unknown key 'game'"),
        ("[thermal]\nfan = 'off'", "use one of fixed, passive, predictive"),
        ("[thermal]\ncool_c = 33", "'passive'"),
        ("[thermal]\nhigh_rpm = 9000", "'passive' or 'predictive'"),
        (
            "[thermal]\nfan = 'predictive'\nrpm = 9000\nhigh_rpm = 9000",
            "need rpm < high_rpm, got 9000.0 and 9000.0",
        ),
        (
            "[thermal]\nhot_boards = {0 = 0.1, 3 = 0.1}\n[cluster]\nboards = 3",
            "no board 3; the cluster has 0 to 2",
        ),
        ("[background_load]\nlow = 0.7", "0.7 and 0.6"),
        ("[background_load]\nidle_windows = [[1, 25]]", "1.0 to 25.0"),
        ("[background_load]\nidle_windows = [[3, 3]]", "idle window"),
        ("[expect]\nmax_peak = 40", "did you mean 'max_peak_c'?"),
        ("[thermal]\nambient_c = [[0, 30], [5, 30], [5, 31]]", "ambient_c"),
    ],
)
def test_tables_and_values_that_do_not_fit_are_named(write: Write, text: str, says: str) -> None:
    assert says in refusal(write(text))


WRONG = {
    "strategy": {"rebalance": ["true", "'always'"], "rebalance_steps": ["1.5", "-1", "1000001"]},
    "thermal": {
        "fan": ["3", "'off'"],
        "rpm": ["'3000'", "1099", "14001", "nan"],
        "high_rpm": ["1099", "14001"],
        "hot_c": ["true", "-41", "151", "inf"],
        "cool_c": ["-41", "151", "nan", "35"],
        "max_slowdown": ["-0.1", "1", "nan"],
        "objective": ["'watts'", "1"],
        "ambient_c": [
            "-41",
            "151",
            "-inf",
            "[3]",
            "[[3, 4, 5]]",
            "[[-1, 30]]",
            "[[1.0, 30.0]]",
            "[]",
        ],
        "fans_working_changes": ["[[nan, 1]]", "[[1, 1.5]]", "[[1, -0.5]]"],
        "start_c": ["-41", "151", "nan"],
        "hot_boards": ["1", "[1]", "{-1 = 0.5}", "{1 = 0}", "{1 = inf}", "{a = 1}"],
        "spread": ["-0.1", "1"],
    },
    "background_load": {
        "games": ["'chess'", "[1]", "[-0.1]", "0.5"],
        "start_hour": ["-1", "24"],
        "low": ["-0.1", "1"],
        "high": ["-0.1", "1", "nan"],
        "mean_session_s": ["0"],
        "takes_soc": ["1"],
        "idle_windows": ["[[1]]"],
    },
}


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        (table, key, value)
        for table, keys in WRONG.items()
        for key, values in keys.items()
        for value in values
    ],
)
def test_a_value_that_its_key_does_not_take_is_named_with_the_key(
    write: Write, table: str, key: str, value: str
) -> None:
    text = f"[{table}]\n{key} = {value}"
    # A table's own keys are named in it.
    named = "hot_boards]" if key == "hot_boards" else last_key(text)
    one_line(refusal(write(text)), f"[{table}", named)


@pytest.mark.parametrize(
    "text",
    [
        "fan = 'predictive'\nhot_c = 36",
        "fan = 'passive'\nmax_slowdown = 0.1",
        "fan = 'predictive'\nobjective = 'energy'",
    ],
)
def test_what_the_fans_do_not_read_is_named(write: Write, text: str) -> None:
    one_line(refusal(write(f"[thermal]\n{text}")), "[thermal]", last_key(text))


@pytest.mark.parametrize("text", ["[data]\nalpha = 0.1", "[expect]\nmax_slowdown = '5 %'"])
def test_values_of_other_tables_are_named(write: Write, text: str) -> None:
    assert last_key(text) in refusal(write(text))


def test_every_key_of_the_tables_has_a_refusal_above() -> None:
    """A key that is added without a test of its bad values shows."""
    assert set(WRONG["thermal"]) == set(ThermalConfig.model_fields)
    assert set(WRONG["background_load"]) == set(BackgroundLoadConfig.model_fields)


hours = st.integers(0, 23).map(float)
changes = st.lists(
    st.tuples(st.integers(0, 9999).map(float), st.floats(0.0, 1.0)),
    unique_by=lambda pair: pair[0],
    max_size=3,
).map(tuple)
ambient_changes = changes.map(
    lambda later: ((0.0, 20.0), *((time_s + 1.0, value) for time_s, value in later))
)
thermals = st.builds(
    ThermalConfig,
    fan=st.sampled_from(FAN_POLICIES),
    rpm=st.floats(1100.0, 8000.0),
    ambient_c=st.floats(-20.0, 45.0) | ambient_changes,
    fans_working_changes=changes,
    hot_boards=st.dictionaries(st.integers(0, 3), st.floats(0.1, 1.0), max_size=2),
    spread=st.floats(0.0, 0.99),
)
windows = st.lists(
    st.tuples(hours, hours).filter(lambda window: window[0] != window[1]), max_size=2
).map(tuple)
users = st.builds(
    BackgroundLoadConfig,
    games=st.sampled_from(GAMES),
    start_hour=hours,
    takes_soc=st.booleans(),
    idle_windows=windows,
)
recorded = st.builds(
    BackgroundLoadConfig,
    games=st.lists(st.floats(0.0, 0.99), min_size=1, max_size=24).map(tuple),
)


@given(
    st.builds(
        Scenario,
        cluster=st.just({"boards": 4}),
        thermal=st.none() | thermals,
        background_load=st.none() | users | recorded,
        strategy=st.builds(
            StrategyConfig, rebalance=st.sampled_from(REBALANCE), rebalance_steps=st.integers(0, 99)
        ),
    )
)
def test_the_resolved_document_is_the_scenario(scenario: Scenario) -> None:
    """Through JSON, as result.json and checkpoints carry it."""
    assert from_document(json.loads(json.dumps(to_document(scenario)))) == scenario


@pytest.mark.parametrize(
    ("mode", "within", "across"),
    [("shares", True, False), ("groups", False, True), ("both", True, True)],
)
def test_modes_of_rebalancing(write: Write, mode: str, within: bool, across: bool) -> None:
    found = rebalancing(
        load_scenario(write(f"[strategy]\nrebalance = '{mode}'\nrebalance_steps = 4"))
    )
    assert found is not None
    assert (found.within_groups, found.across_groups, found.steps) == (within, across, 4)


def test_the_load_that_fans_are_told_is_the_planned_one(write: Write) -> None:
    """SoCs that take no part draw their idle watts, all others at most their active ones; the end is the plan's."""
    loaded = load_scenario(
        write("[cluster]\nboards = 4\n[strategy]\nsocs = 10\ngroups = 2\n[train]\nepochs = 1")
    )
    cluster = scenario_cluster(loaded)
    load = planned_load(loaded, cluster, Rack(slots_per_board=cluster.slots_per_board))
    device = cluster.device_of(0)
    active_w = device.processor(device.default_processor).active_w + device.network_w
    assert 20 * device.idle_w < load.rack_w < 10 * active_w + 10 * device.idle_w
    assert 0.0 < load.end_s < 3600.0
    everybody = planned_load(
        load_scenario(write("[cluster]\nboards = 4\n[strategy]\nname = 'fedavg'\nsocs = 10")),
        cluster,
        Rack(slots_per_board=cluster.slots_per_board),
    )
    assert everybody.rack_w == pytest.approx(
        10 * (active_w - device.network_w) + 10 * device.idle_w
    )
