"""What is shipped: `socflower scenarios`, names in place of files, and `socflower demo`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from socflower.scenario import shipped
from socflower.scenario.schema.file import load_scenario
from tests.command_line import Socflower, is_mistake

ROOT = Path(__file__).parents[2]
FILES = [
    path for part in ("", "full", "planned") for path in (ROOT / "scenarios" / part).glob("*.toml")
]


def test_every_file_is_listed_once_under_its_name() -> None:
    assert sorted(shipped.scenario_files().values()) == sorted(FILES)


def test_the_list_says_what_each_asks_and_needs(socflower: Socflower) -> None:
    ran = socflower("scenarios --json")
    assert ran.status == 0
    listed = {entry["name"]: entry for entry in json.loads(ran.out)["scenarios"]}
    assert len(listed) == len(FILES)
    assert all(entry["question"].endswith("?") for entry in listed.values())
    assert listed["digits_demo"]["num_socs"] == 32
    assert listed["digits_demo"]["needs"] == ["socflower[demo]"]
    assert listed["pipeline_pays"]["needs"] == ["socflower plan"]
    assert listed["mnist_rings"]["needs"] == [
        "mnist in SOCFLOWER_DATA, or socflower[hub]",
        "--engine deployment",
    ]


def test_recorded_times_are_of_scenarios_that_exist() -> None:
    recorded = json.loads((ROOT / "scenarios" / "recorded.json").read_text("utf-8"))
    assert set(recorded["cpu_s"]) <= set(shipped.scenario_files())
    assert all(cpu_s > 0 for cpu_s in recorded["cpu_s"].values())


def test_the_list_fits_80_columns(socflower: Socflower) -> None:
    ran = socflower("scenarios")
    assert ran.status == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    for name in shipped.scenario_files():
        assert f"{name}\n" in ran.out


def test_a_scenario_is_planned_by_name_from_any_folder(socflower: Socflower) -> None:
    """Its cluster file is named by a path relative to the scenario's own file."""
    ran = socflower("plan measured_board --json")
    assert ran.status == 0, ran.err
    by_path = socflower(f"plan {ROOT}/scenarios/measured_board.toml --json")
    assert json.loads(ran.out) == json.loads(by_path.out)


def test_a_file_of_the_name_of_a_shipped_scenario_wins(
    socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "digits_demo").write_text("# Mine?\nseeds = 5\n")
    assert shipped.find_scenario(tmp_path / "digits_demo") == tmp_path / "digits_demo"
    is_mistake(socflower("plan digits_demo"), "seeds")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("digit_demo", "did you mean digits_demo?"),
        ("scenarios/digits_demo.toml", "did you mean digits_demo?"),
        ("xyzzy", "`socflower scenarios`"),
        ("nowhere/xyzzy.toml", "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["run", "compare", "plan"])
def test_an_unknown_name_is_refused_in_one_line(
    socflower: Socflower, command: str, name: str, named: str
) -> None:
    is_mistake(socflower(f"{command} {name}"), named)


def test_an_installed_package_has_scenarios_and_clusters_within(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(ROOT / "scenarios", tmp_path / "_shipped" / "scenarios")
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path)
    shipped.scenario_files.cache_clear()
    try:
        found = shipped.find_scenario(Path("measured_board"))
        assert found == tmp_path / "_shipped" / "scenarios" / "measured_board.toml"
        assert load_scenario(found) == load_scenario(ROOT / "scenarios" / "measured_board.toml")
    finally:
        shipped.scenario_files.cache_clear()


def test_the_demo_trains_the_front_of_digits_demo_to_its_target(
    socflower: Socflower, monkeypatch: pytest.MonkeyPatch
) -> None:
    from socflower.scenario import comparison
    from socflower.scenario.predicted_methods import Front

    called = []

    def compare(scenario: object, strategies: object, out: object, **options: Any) -> None:
        called.append((scenario, strategies, out, options["until_target"]))
        assert isinstance(options["front"], Front)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "compare", compare)
    assert socflower("demo --workers 0").status == 130
    demo = load_scenario(ROOT / "scenarios" / "digits_demo.toml")
    assert called == [(demo, list(demo.compare.strategies), Path("out/demo"), True)]


def test_digits_without_their_package_are_one_line(
    socflower: Socflower, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    from socflower.workloads import sources

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sources.importlib.metadata, "version", version)
    sources._load_digits.cache_clear()
    is_mistake(socflower("run digits_demo"), "pip install 'socflower[demo]'")
