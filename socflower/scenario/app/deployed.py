"""A scenario as Flower's processes need it: its app as files, and a node config for each participating SoC.

If Flower's processes share this machine's disk, the run config names the run's folder (`run-folder`). Otherwise the
bundle contains the scenario, and Flower sends the bundle to the SuperLink and to every SuperNode.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from socflower.engines.app_files import AppFiles
from socflower.engines.deployment.options import DeployedApp
from socflower.scenario.planning import groups_of
from socflower.scenario.schema.file import scenario_cluster, to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import group_strategy
from socflower.user_code import own_sources

SCENARIO_FILE = "scenario.json"
CODE_FOLDER = "code"
"""Of a bundle: the modules of the user's that the scenario names functions of."""

_IN_FOLDER = '''"""The {part}App of every socflower scenario."""

from socflower.scenario.app.main import {name}_app as app

__all__ = ["app"]
'''
_IN_BUNDLE = '''"""The {part}App of every socflower scenario; the scenario is in the same folder."""

from pathlib import Path
{first}
from socflower.scenario.app.remote_main import bundled_{name}_app

app = bundled_{name}_app(Path(__file__).parent)

__all__ = ["app"]
'''


def deployed_app(scenario: Scenario) -> DeployedApp:
    """Return the scenario's app as the plain values that a deployment takes."""
    return DeployedApp(
        document=to_document(scenario),
        local_files=app_in_folder(),
        bundle_files=app_in_bundle(scenario),
        node_configs=node_configs(scenario),
        needs_cloud=needs_cloud(scenario),
    )


def participants(scenario: Scenario) -> tuple[int, ...]:
    """Return the SoCs of the scenario's plan, then spare ones; if only training can decide the plan, the first SoCs."""
    cluster, settings = scenario_cluster(scenario), scenario.strategy
    if not scenario.kind.has_groups:
        return tuple(range(settings.socs or cluster.num_socs))
    num_socs = group_strategy(settings.name).num_socs or settings.socs or cluster.num_socs
    num_groups = settings.num_groups(num_socs)
    if isinstance(num_groups, str):
        planned = tuple(range(num_socs))
    else:
        planned = groups_of(scenario, cluster, num_groups, num_socs).participants
    if not settings.use_spares:
        return planned
    return (*planned, *sorted(set(range(cluster.num_socs)).difference(planned)))


def node_configs(scenario: Scenario) -> tuple[str, ...]:
    """Return `--node-config` of each SuperNode: its data partition and its position in the rack."""
    cluster, socs = scenario_cluster(scenario), participants(scenario)
    configs = []
    for index, soc in enumerate(socs):
        board = cluster.board_of(soc)
        configs.append(
            f"partition-id={index} num-partitions={len(socs)} board={board} "
            f"slot={soc - cluster.socs_of(board).start}"
        )
    return tuple(configs)


def needs_cloud(scenario: Scenario) -> bool:
    """Return whether a scenario's edges connect to a cloud."""
    return scenario.kind.uses_cloud and scenario.strategy.name != "edge-only"


# Loading torch takes seconds, in which a process may die.
_SHOW_LIFE = """
from socflower.engines.deployment.outcome_lines import show_life

show_life()
"""


def app_in_folder() -> AppFiles:
    """Return the app that reads its scenario from the run's folder on this machine."""
    return _app(_IN_FOLDER)


def app_in_bundle(scenario: Scenario) -> AppFiles:
    """Return the app whose bundle contains its scenario, and the modules of its factories, for other machines."""
    own = own_sources(Path(scenario.folder), scenario.factories) if scenario.folder else {}
    return _app(
        _IN_BUNDLE,
        {
            SCENARIO_FILE: json.dumps(to_document(scenario)),
            **{f"{CODE_FOLDER}/{name}": file.read_text("utf-8") for name, file in own.items()},
        },
    )


def bundled_document(bundle: Path) -> dict[str, Any]:
    """Return the document of a bundle's scenario, whose factories are imported from the bundle."""
    document: dict[str, Any] = json.loads((bundle / SCENARIO_FILE).read_text("utf-8"))
    return {**document, "folder": str(bundle / CODE_FOLDER)} if "folder" in document else document


def _app(template: str, extra_files: Mapping[str, str] | None = None) -> AppFiles:
    return AppFiles(
        server_app=template.format(part="Server", name="server", first=_SHOW_LIFE),
        client_app=template.format(part="Client", name="client", first=""),
        extra_files=extra_files or {},
    )
