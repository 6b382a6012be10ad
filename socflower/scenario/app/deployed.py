"""What a deployment needs of a scenario: its app, and a node config for each participating SoC."""

from socflower.cluster import sustained_rates
from socflower.engines.deployment.options import DeployedApp
from socflower.hierarchy import plan_groups
from socflower.scenario.app.files import app_in_bundle, app_in_folder
from socflower.scenario.arithmetic import pricing
from socflower.scenario.schema.config import Scenario
from socflower.scenario.schema.file import scenario_cluster, to_document


def deployed_app(scenario: Scenario) -> DeployedApp:
    """Return the scenario's app as the plain values that a deployment takes."""
    return DeployedApp(
        document=to_document(scenario), local_files=app_in_folder(), bundle_files=app_in_bundle(scenario),
        node_configs=node_configs(scenario), needs_cloud=needs_cloud(scenario))


def participants(scenario: Scenario) -> tuple[int, ...]:
    """Return the SoCs that the scenario's plan uses; if only training can decide the plan, the first SoCs."""
    cluster, settings = scenario_cluster(scenario), scenario.strategy
    num_socs = 1 if settings.name == "sgd" else settings.socs or cluster.num_socs
    if settings.name == "fedavg" or scenario.is_split or (settings.name == "socflow" and settings.groups == "auto"):
        return tuple(range(num_socs))
    num_groups = settings.groups if settings.name == "socflow" and isinstance(settings.groups, int) else 1
    rates = sustained_rates(cluster, scenario.model.name, pricing(scenario))
    return plan_groups(cluster, num_groups, num_socs, rates).participants


def node_configs(scenario: Scenario) -> tuple[str, ...]:
    """Return `--node-config` of each SuperNode: its data partition and its position in the rack."""
    cluster, socs = scenario_cluster(scenario), participants(scenario)
    configs = []
    for index, soc in enumerate(socs):
        board = cluster.board_of(soc)
        configs.append(f"partition-id={index} num-partitions={len(socs)} board={board} "
                       f"slot={soc - cluster.socs_of(board).start}")
    return tuple(configs)


def needs_cloud(scenario: Scenario) -> bool:
    """Return whether a scenario's edges connect to a cloud."""
    return scenario.is_split and scenario.strategy.name != "edge-only"
