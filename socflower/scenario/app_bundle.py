"""The Flower app that carries a scenario into Flower's processes: three small files, and the scenario where it travels.

Where Flower's processes share this machine's disk they are told of the run's folder (`run-folder`). Elsewhere the
scenario is in the bundle itself, which Flower brings to the SuperLink and to every SuperNode.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from socflower.scenario.config import Scenario
from socflower.scenario.scenario_file import to_document

RUN_FOLDER_KEY = "run-folder"
NUM_NODES_KEY = "num-nodes"
CHECKPOINT_FOLDER_KEY = "checkpoint-folder"
FRESH_KEY = "fresh"

SCENARIO_FILE = "scenario.json"

_IN_FOLDER = '''"""The {part}App of every socflower scenario."""

from socflower.scenario.app import {name}_app as app

__all__ = ["app"]
'''
_IN_BUNDLE = '''"""The {part}App of every socflower scenario; the scenario lies beside it."""

from pathlib import Path

from socflower.scenario.bundled_app import bundled_{name}_app

app = bundled_{name}_app(Path(__file__).parent)

__all__ = ["app"]
'''
_PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "socflower-scenario"
version = "1.0.0"
description = "A socflower scenario"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "socflower"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
"""


def write_app(app: Path, run_folder: Path, *, num_nodes: int = 0) -> None:
    """Make `app` the folder of a Flower app whose scenario lies in `run_folder`, on this machine.

    The ServerApp waits until `num_nodes` SuperNodes are there; 0 waits for none.
    """
    _write(app, _IN_FOLDER, {RUN_FOLDER_KEY: str(run_folder), NUM_NODES_KEY: num_nodes})


def write_bundle(
    app: Path, scenario: Scenario, *, num_nodes: int, checkpoint_folder: str = "", fresh: bool = False,
) -> None:
    """Make `app` the folder of a Flower app that has its scenario with it, and needs nothing of this machine.

    `checkpoint_folder` is a path on the SuperLink's machine; "" keeps no checkpoints.
    """
    _write(app, _IN_BUNDLE, {NUM_NODES_KEY: num_nodes, CHECKPOINT_FOLDER_KEY: checkpoint_folder, FRESH_KEY: fresh})
    (app / SCENARIO_FILE).write_text(json.dumps(to_document(scenario)), "utf-8")


def _write(app: Path, source: str, run_config: Mapping[str, Any]) -> None:
    app.mkdir()
    (app / "server_app.py").write_text(source.format(part="Server", name="server"), "utf-8")
    (app / "client_app.py").write_text(source.format(part="Client", name="client"), "utf-8")
    # A JSON string, number or truth value is one of TOML as well.
    config = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in run_config.items())
    (app / "pyproject.toml").write_text(_PROJECT + config, "utf-8")
