"""The scenarios and the templates of Flower apps that socflower ships."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from socflower.did_you_mean import closest
from socflower.errors import ConfigError
from socflower.workloads.sources import data_names

_PACKAGE = Path(__file__).parents[1]
_RECORDED = "recorded.json"
# Other sub-folders hold clusters and an app.
_SUBFOLDERS = ("", "full", "planned")


def shipped_folder(name: str) -> Path:
    """Return the folder "scenarios", "templates" or "docs/results": within the package, or of the checkout in use."""
    installed = _PACKAGE / "_shipped" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


@cache
def scenario_files() -> dict[str, Path]:
    """Return the shipped scenarios by name, which is that of the file without its ending; `full/` comes last."""
    folder = shipped_folder("scenarios")
    return {
        path.stem: path for part in _SUBFOLDERS for path in sorted((folder / part).glob("*.toml"))
    }


def find_scenario(path: Path) -> Path:
    """Return `path` if it exists, else the shipped scenario of that name.

    Raises `ConfigError` for a name that is neither, and for a missing file whose name is like that of a scenario.
    """
    names = scenario_files()
    if path.exists() or path.is_symlink():
        return path
    if str(path) in names:
        return names[str(path)]
    is_name = path.name == str(path) and not path.suffix
    meant = closest(path.stem, names, similarity=0.6 if is_name else 0.8)
    if not meant and not is_name:
        # Reading the file tells the user what is missing.
        return path
    raise ConfigError(
        f"scenario {path}: no such file, and no scenario of that name is shipped; "
        f"{meant and f'did you mean {meant}? '}`socflower scenarios` lists them"
    )


def list_scenarios() -> Iterator[dict[str, Any]]:
    """Yield a document for each shipped scenario: question, size, what it needs, and its CPU time when recorded."""
    from socflower.scenario.schema.file import load_scenario, scenario_cluster

    recorded = json.loads((shipped_folder("scenarios") / _RECORDED).read_text("utf-8"))
    for name, path in scenario_files().items():
        scenario = load_scenario(path)
        yield {
            "name": name,
            "path": str(path),
            "question": first_question(scenario.question),
            "num_socs": scenario.strategy.socs or scenario_cluster(scenario).num_socs,
            "model": scenario.model.name,
            "data": scenario.data.name,
            "strategy": scenario.strategy.name,
            "epochs": scenario.train.epochs,
            "needs": ["socflower plan"]
            if scenario.pipeline is not None and scenario.pipeline.sample
            else needs_of(scenario.data.name, scenario.question),
            "recorded_cpu_s": recorded["cpu_s"].get(name),
        }


def first_question(text: str) -> str:
    """Return a scenario's comment up to its first question mark."""
    return text[: text.index("?") + 1] if "?" in text else text


def needs_of(data: str | None, comment: str) -> list[str]:
    """Return the packages and options that a scenario with this data set and comment needs."""
    needed = []
    if data == "digits":
        needed.append("socflower[demo]")
    elif data in data_names():
        needed.append(f"{data} in SOCFLOWER_DATA, or socflower[hub]")
    if "--engine deployment" in comment:
        needed.append("--engine deployment")
    return needed
