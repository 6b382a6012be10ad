"""The app of a scenario as files: three small ones, and the scenario if the app runs on other machines.

If Flower's processes share this machine's disk, the run config names the run's folder (`run-folder`). Otherwise the
bundle contains the scenario, and Flower sends the bundle to the SuperLink and to every SuperNode.
"""

import json
from collections.abc import Mapping

from socflower.engines.app_files import AppFiles
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import to_document

SCENARIO_FILE = "scenario.json"

_IN_FOLDER = '''"""The {part}App of every socflower scenario."""

from socflower.scenario.app.main import {name}_app as app

__all__ = ["app"]
'''
_IN_BUNDLE = '''"""The {part}App of every socflower scenario; the scenario is in the same folder."""

from pathlib import Path

from socflower.scenario.app.remote_main import bundled_{name}_app

app = bundled_{name}_app(Path(__file__).parent)

__all__ = ["app"]
'''


def app_in_folder() -> AppFiles:
    """Return the app that reads its scenario from the run's folder on this machine."""
    return _app(_IN_FOLDER)


def app_in_bundle(scenario: Scenario) -> AppFiles:
    """Return the app whose bundle contains its scenario, for other machines."""
    return _app(_IN_BUNDLE, {SCENARIO_FILE: json.dumps(to_document(scenario))})


def _app(template: str, extra_files: Mapping[str, str] | None = None) -> AppFiles:
    return AppFiles(server_app=template.format(part="Server", name="server"),
                    client_app=template.format(part="Client", name="client"), extra_files=extra_files or {})
