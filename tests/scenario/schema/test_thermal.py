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
from socflower.scenario.schema.config import REBALANCE, Scenario, StrategyConfig
from socflower.scenario.schema.file import (
    from_document,
    load_scenario,
    scenario_cluster,
    to_document,
)
from socflower.scenario.schema.thermal import (
    FAN_POLICIES,
    GAMES,
    BackgroundLoadConfig,
    ThermalConfig,
)
from socflower.thermal.model.rack import Rack

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
ambient_c = 20
ambient_changes = [[600, 30], [60, 25.5]]
fans_working_changes = [[900, 0.5]]
start_c = 22
hot_boards = [1]
hot_board_airflow = 0.3
spread = 0.2
[background_load]
games = "tidal"
start_hour = 18
low = 0.1
high = 0.5
low_hour = 4
mean_session_s = 1200
share = 0.4
power_w = 2
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
    with pytest.raises(SocflowerError) as caught:
        prepare(load_scenario(path), "local")
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def test_every_key_is_read(write: Write) -> None:
    loaded = load_scenario(write(FULL))
    thermal = ThermalConfig(
        fan="passive",
        rpm=2000.0,
        high_rpm=9000.0,
        hot_c=36.0,
        cool_c=33.0,
        ambient_c=20.0,
        ambient_changes=((600.0, 30.0), (60.0, 25.5)),
        fans_working_changes=((900.0, 0.5),),
        start_c=22.0,
        hot_boards=(1,),
        hot_board_airflow=0.3,
        spread=0.2,
    )
    users = BackgroundLoadConfig(
        games="tidal",
        start_hour=18.0,
        low=0.1,
        high=0.5,
        low_hour=4.0,
        mean_session_s=1200.0,
        share=0.4,
        power_w=2.0,
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
            if key != "max_slowdown"
        )  # of another policy
    predictive = load_scenario(
        write("[thermal]\nfan = 'predictive'\nmax_slowdown = 0.1\nhigh_rpm = 9000.0")
    ).thermal
    assert predictive is not None and (predictive.max_slowdown, predictive.high_rpm) == (
        0.1,
        9000.0,
    )


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("thermal = 1", "[thermal] must be a table, got 1"),
        ("background_load = []", "[background_load] must be a table, got []"),
        ("[thermal]\nfans = 1", "unknown key 'fans'"),
        ("[background_load]\ngame = 'tidal'", "unknown key 'game'"),
        (
            "[strategy]\nrebalance = true",
            "[strategy] rebalance = True must be one of off, shares, groups, both",
        ),
        (
            "[strategy]\nrebalance = 'always'",
            "[strategy] rebalance = 'always' is unknown; use one of off, shares, groups, both",
        ),
        (
            "[strategy]\nrebalance_steps = 1.5",
            "[strategy] rebalance_steps = 1.5 must be a whole number",
        ),
        (
            "[strategy]\nrebalance_steps = -1",
            "[strategy] rebalance_steps = -1 must be a whole number from 0 to 1000000",
        ),
        ("[thermal]\nfan = 3", "[thermal] fan = 3 must be one of fixed, passive, predictive"),
        (
            "[thermal]\nfan = 'off'",
            "[thermal] fan = 'off' is unknown; use one of fixed, passive, predictive",
        ),
        ("[thermal]\nrpm = '3000'", "[thermal] rpm = '3000' must be a number"),
        ("[thermal]\nrpm = 0", "[thermal] rpm = 0 must be a number from 1100 to 14000"),
        ("[thermal]\nrpm = nan", "[thermal] rpm = nan must be a number from 1100 to 14000"),
        (
            "[thermal]\nhigh_rpm = 20000",
            "[thermal] high_rpm = 20000 must be a number from 1100 to 14000",
        ),
        (
            "[thermal]\nfan = 'passive'\nrpm = 12000",
            "[thermal] rpm = 12000.0, the low speed, must be below high_rpm = 11000.0",
        ),
        (
            "[thermal]\nfan = 'predictive'\nrpm = 9000\nhigh_rpm = 9000",
            "must be below high_rpm = 9000.0",
        ),
        ("[thermal]\nhot_c = true", "[thermal] hot_c = True must be a number"),
        ("[thermal]\nhot_c = inf", "[thermal] hot_c = inf must be a number from -40 to 150"),
        ("[thermal]\ncool_c = nan", "[thermal] cool_c = nan must be a number from -40 to 150"),
        ("[thermal]\ncool_c = 35", "[thermal] cool_c = 35.0 must be below hot_c = 35.0"),
        (
            "[thermal]\ncool_c = 33",
            "[thermal] cool_c = 33.0 is for fan = 'passive', and it is 'fixed'; leave it out",
        ),
        (
            "[thermal]\nfan = 'predictive'\nhot_c = 36",
            "[thermal] hot_c = 36.0 is for fan = 'passive', and it is",
        ),
        (
            "[thermal]\nhigh_rpm = 9000",
            "high_rpm = 9000.0 is for fan = 'passive' or 'predictive', and it is 'fixed'",
        ),
        (
            "[thermal]\nfan = 'passive'\nmax_slowdown = 0.1",
            "max_slowdown = 0.1 is for fan = 'predictive', and it is",
        ),
        (
            "[data]\nalpha = 0.1",
            "[data] alpha = 0.1 is for partition = 'dirichlet', and it is 'iid'; leave it out",
        ),
        (
            "[thermal]\nmax_slowdown = 1",
            "[thermal] max_slowdown = 1 must be a number of 0 or more and below 1",
        ),
        ("[thermal]\nmax_slowdown = nan", "max_slowdown = nan"),
        ("[thermal]\nspread = -0.1", "spread = -0.1 must be a number of 0 or more and below 1"),
        (
            "[thermal]\nambient_c = -inf",
            "[thermal] ambient_c = -inf must be a number from -40 to 150",
        ),
        ("[thermal]\nstart_c = nan", "[thermal] start_c = nan must be a number from -40 to 150"),
        (
            "[thermal]\nambient_c = 1e18",
            "[thermal] ambient_c = 1e+18 must be a number from -40 to 150",
        ),
        ("[thermal]\nstart_c = -400", "[thermal] start_c = -400 must be a number from -40 to 150"),
        (
            "[thermal]\nambient_changes = [[3, 400]]",
            "list of pairs of a number of 0 or more and a number from -40 to",
        ),
        ("[thermal]\nambient_changes = 3", "[thermal] ambient_changes = 3 must be a list"),
        (
            "[thermal]\nambient_changes = [3]",
            "[thermal] ambient_changes = [3] must be a list of pairs of",
        ),
        ("[thermal]\nambient_changes = [[3, 4, 5]]", "must be a list of pairs of"),
        ("[thermal]\nambient_changes = [[3, true]]", "must be a list of pairs of"),
        (
            "[thermal]\nambient_changes = [[-1, 30]]",
            "ambient_changes = [[-1, 30]] must be a list of pairs of a",
        ),
        (
            "[thermal]\nambient_changes = [[1, inf]]",
            "ambient_changes = [[1, inf]] must be a list of pairs of",
        ),
        (
            "[thermal]\nambient_changes = [[5, 30], [5, 31]]",
            "[thermal] ambient_changes: one change at a time",
        ),
        (
            "[thermal]\nfans_working_changes = [[nan, 1]]",
            "fans_working_changes = [[nan, 1]] must be a list of",
        ),
        (
            "[thermal]\nfans_working_changes = [[1, 1.5]]",
            "pairs of a number of 0 or more and a number from 0 to 1",
        ),
        (
            "[thermal]\nfans_working_changes = [[1, -0.5]]",
            "fans_working_changes = [[1, -0.5]] must be a list",
        ),
        ("[thermal]\nhot_boards = 1", "[thermal] hot_boards = 1 must be a list"),
        (
            "[thermal]\nhot_boards = [0.5]",
            "[thermal] hot_boards = [0.5] must be a list of whole numbers",
        ),
        (
            "[thermal]\nhot_boards = [-1]",
            "[thermal] hot_boards = [-1] must be a list of whole numbers of 0 or more",
        ),
        (
            "[thermal]\nhot_boards = [0, 3]\n[cluster]\nboards = 3",
            "case [thermal] hot_boards: there is no board 3; the cluster has 0 to 2",
        ),
        (
            "[thermal]\nhot_boards = [1, 0, 1]",
            "[thermal] hot_boards = [1, 0, 1] names a board twice; name each once",
        ),
        (
            "[thermal]\nhot_board_airflow = 0.5",
            "[thermal] hot_board_airflow = 0.5 without hot_boards: no board has it",
        ),
        (
            "[thermal]\nhot_board_airflow = 0",
            "[thermal] hot_board_airflow = 0 must be a number above 0",
        ),
        (
            "[thermal]\nhot_board_airflow = inf",
            "hot_board_airflow = inf must be a number above 0 and finite",
        ),
        (
            "[background_load]\ngames = 'chess'",
            "[background_load] games = 'chess' is unknown; use one of none, tidal",
        ),
        (
            "[background_load]\nstart_hour = 24",
            "start_hour = 24 must be a number of 0 or more and below 24",
        ),
        (
            "[background_load]\nlow_hour = -1",
            "low_hour = -1 must be a number of 0 or more and below 24",
        ),
        (
            "[background_load]\nlow_hour = nan",
            "low_hour = nan must be a number of 0 or more and below 24",
        ),
        (
            "[background_load]\nlow = 0.7",
            "[background_load] tide: need 0 <= low <= high < 1, got 0.7 and 0.6",
        ),
        (
            "[background_load]\nhigh = 1",
            "[background_load] high = 1 must be a number of 0 or more and below 1",
        ),
        ("[background_load]\nhigh = nan", "[background_load] high = nan must be a number"),
        (
            "[background_load]\nmean_session_s = 0",
            "[background_load] mean_session_s = 0 must be a number above 0",
        ),
        (
            "[background_load]\nshare = 1",
            "[background_load] share = 1 must be a number of 0 or more and below 1",
        ),
        (
            "[background_load]\npower_w = -1",
            "[background_load] power_w = -1 must be a number of 0 or more",
        ),
        (
            "[background_load]\ntakes_soc = 1",
            "[background_load] takes_soc = 1 must be true or false",
        ),
        (
            "[background_load]\nidle_windows = [[1]]",
            "idle_windows = [[1]] must be a list of pairs of",
        ),
        (
            "[background_load]\nidle_windows = [[1, 25]]",
            "[background_load] idle window: hours must lie between 0 and 24 and differ, got 1.0 to 25.0",
        ),
        (
            "[background_load]\nidle_windows = [[3, 3]]",
            "idle window: hours must lie between 0 and 24 and differ",
        ),
        (
            "[expect]\nmax_peak = 40",
            "unknown claim 'max_peak' (value 40); did you mean 'max_peak_c'?",
        ),
        ("[expect]\nmax_slowdown = '5 %'", "max_slowdown = '5 %' must be a number"),
    ],
)
def test_what_cannot_be_is_refused_with_key_and_value(write: Write, text: str, says: str) -> None:
    assert says in refusal(write(text))


def test_every_number_and_text_of_the_tables_has_a_refusal_above() -> None:
    """A key that is added here without a test of its bad values shows."""
    cases = test_what_cannot_be_is_refused_with_key_and_value.pytestmark[0].args[1]  # type: ignore[attr-defined]
    for table, kind in (("thermal", ThermalConfig), ("background_load", BackgroundLoadConfig)):
        for key in kind.model_fields:
            texts = [text for text, _ in cases if text.startswith(f"[{table}]\n")]
            assert any(f"\n{key} = " in text for text in texts), key


hours = st.integers(0, 23).map(float)
changes = st.lists(
    st.tuples(st.integers(0, 9999).map(float), st.floats(0.0, 1.0)),
    unique_by=lambda pair: pair[0],
    max_size=3,
).map(tuple)
thermals = st.builds(
    ThermalConfig,
    fan=st.sampled_from(FAN_POLICIES),
    rpm=st.floats(1100.0, 8000.0),
    ambient_c=st.floats(-20.0, 45.0),
    ambient_changes=changes,
    fans_working_changes=changes,
    hot_boards=st.lists(st.integers(0, 3), max_size=2, unique=True).map(tuple),
    spread=st.floats(0.0, 0.99),
)
windows = st.lists(
    st.tuples(hours, hours).filter(lambda window: window[0] != window[1]), max_size=2
).map(tuple)
users = st.builds(
    BackgroundLoadConfig,
    games=st.sampled_from(GAMES),
    start_hour=hours,
    low_hour=hours,
    takes_soc=st.booleans(),
    share=st.floats(0.0, 0.99),
    idle_windows=windows,
)


@given(
    st.builds(
        Scenario,
        cluster=st.just({"boards": 4}),
        thermal=st.none() | thermals,
        background_load=st.none() | users,
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
