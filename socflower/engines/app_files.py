"""The Flower app that runs a scenario in Flower's processes: the source of its two apps, and further files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_FOLDER_KEY = "run-folder"
NUM_NODES_KEY = "num-nodes"
CHECKPOINT_FOLDER_KEY = "checkpoint-folder"
FRESH_KEY = "fresh"
SEND_MODEL_KEY = "send-model"
SERIES_KEY = "series"
"""On a remote SuperLink: the id of the submissions of which one trains and the others stand by."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class AppFiles:
    """The files of a Flower app; its run config is given when the folder is written."""

    # The source of a module with `app`.
    server_app: str
    client_app: str
    # The texts of further files, by name.
    extra_files: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, run_config: Mapping[str, Any]) -> None:
        """Create `folder`, which must not exist, with the files of the app."""
        folder.mkdir()
        files = {
            "server_app.py": self.server_app,
            "client_app.py": self.client_app,
            **self.extra_files,
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")
        # A JSON string, number or boolean is valid TOML.
        config = "".join(
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
            for key, value in run_config.items()
        )
        (folder / "pyproject.toml").write_text(_PROJECT + config, "utf-8")
