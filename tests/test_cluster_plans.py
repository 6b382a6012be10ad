"""What `plan` says of the shipped cluster files: the page, and that no figure is absurd."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from socflower.cluster.cluster_file import doubtful_figures, load_cluster
from socflower.scenario.choices import with_choices
from socflower.scenario.planning import plan_scenario
from socflower.scenario.schema.file import load_scenario, scenario_cluster

ROOT = Path(__file__).parents[1]


def page_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cluster_plans", ROOT / "docs/cluster_plans.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = page_maker()
FILES = MAKER.cluster_files()


def choices(path: Path, *overrides: str) -> list[dict[str, Any]]:
    scenario = load_scenario(path, overrides)
    cluster = scenario_cluster(scenario)
    rows: list[dict[str, Any]] = with_choices(scenario, cluster, plan_scenario(scenario))["choices"]
    return rows


def test_the_page_has_a_row_for_each_of_ten_files_and_plan_doubts_none() -> None:
    rows = [line for line in MAKER.PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [f.stem for f in FILES]
    assert len(FILES) >= 10
    assert not [why for file in FILES for why in doubtful_figures(load_cluster(file))]


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=() if file.stem == "two_pis" else pytest.mark.slow, id=file.stem)
        for file in FILES
    ],
)
def test_a_row_is_what_plan_says_today_and_its_choice_is_not_slower_than_one_soc(
    file: Path,
) -> None:
    document = MAKER.planned(file)
    assert MAKER.row(file, document) in MAKER.PAGE.read_text("utf-8")
    for choice in document["choices"]:
        assert 0.0 < choice["epoch_s"] <= choice["training_s"]
        assert choice["epoch_energy_j"] > 0.0 and choice["memory_bytes"] > 0.0
    assert max(choice["speedup"] for choice in document["choices"]) >= 1.0


@pytest.mark.parametrize(
    ("device", "model", "counts"),
    [
        ("raspberry-pi-4b", "lenet5", (1, 2)),
        pytest.param("raspberry-pi-4b", "resnet8", (1, 2, 4, 8), marks=pytest.mark.slow),
        pytest.param("snapdragon-865", "vgg11", (1, 2, 4, 8), marks=pytest.mark.slow),
        pytest.param("jetson-nano", "vgg-small", (1, 2, 4, 8), marks=pytest.mark.slow),
    ],
)
def test_twice_the_boards_are_never_slower_in_the_quickest_choice(
    device: str, model: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    quickest_s = []
    for boards in counts:
        file = tmp_path / f"{boards}.toml"
        file.write_text(f'[cluster]\nboards = {boards}\nsocs_per_board = 2\ndevice = "{device}"\n')
        quickest_s.append(min(row["epoch_s"] for row in choices(file, f"model.name={model}")))
    assert quickest_s == sorted(quickest_s, reverse=True)
