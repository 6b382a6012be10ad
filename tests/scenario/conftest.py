"""What several files of these tests need to be trained once."""

import json
from pathlib import Path

import pytest

from socflower.scenario.schema.file import to_document
from socflower.scenario.schema.scenario_file import Scenario
from tests.scenario.small_runs import Reference, without_drawing


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Folders of runs that were never interrupted, each scenario trained once."""
    folders: dict[str, Path] = {}

    def run(scenario: Scenario) -> Path:
        key = json.dumps(to_document(scenario))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("reference") / "out"
            without_drawing(scenario, folders[key])
        return folders[key]

    return run
