"""The edges that train with a cloud beside a scenario's groups: a split scenario made of its tables."""

from socflower.cluster.cluster_file import ClusterTable
from socflower.errors import ConfigError
from socflower.hierarchy import group_steps_per_epoch, sync_schedule
from socflower.rings.settings import RingSettings
from socflower.scenario.arithmetic import num_training_samples
from socflower.scenario.schema.config import CompareConfig, PrecisionConfig, Scenario, StrategyConfig
from socflower.scenario.schema.strategies import group_strategy
from socflower.scenario.split_models import ShareOfImages
from socflower.scenario.split_setting import SplitSetting
from socflower.scenario.workload import num_samples


def edges_beside(scenario: Scenario) -> SplitSetting:
    """Return the edges beside a scenario's groups: a device for each, rounds that end with the groups', their data.

    Edges train in FP32 beside groups in mixed precision, and in int8 beside groups in int8.
    """
    edges = edges_scenario(scenario)
    settings, num_groups = scenario.strategy, int(scenario.strategy.groups)
    steps = group_steps_per_epoch(num_training_samples(scenario, num_samples(scenario)), num_groups,
                                  scenario.train.batch_size)
    intervals = sync_schedule(scenario.train.epochs, steps, group_strategy(settings.name).sync_interval_epochs(
        settings.sync_interval_epochs), server_interval=settings.server_interval)
    return SplitSetting(edges, ShareOfImages(edges, scenario.split.edges, scenario),
                        [interval.epoch_end for interval in intervals])


def edges_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario that the edges alone would train, with all data; `ConfigError` if it cannot be."""
    table, precision = scenario.split, scenario.precision
    name = table.edge_device or scenario.cluster.device
    if name.endswith(".toml"):
        raise ConfigError(f"{scenario.name} [edgecloud] edge_device = {name!r}: name a device of the catalogue, or "
                          "of a [device.NAME] table")
    return scenario.replaced(
        cluster=ClusterTable(name="edges", boards=table.edges, socs_per_board=1, device=name),
        boards=(), servers=(), site=None, ring=RingSettings(), compare=CompareConfig(), events=(), expect={},
        strategy=StrategyConfig(name="split-replay", tolerate_client_errors=scenario.strategy.tolerate_client_errors),
        train=scenario.train.replaced(local_epochs=1, reduction="auto"),
        precision=precision.replaced(held_out=0) if precision.arithmetic == "int8" else PrecisionConfig(),
        thermal=scenario.thermal and scenario.thermal.elsewhere,
        edgecloud=table.replaced(edges=0, edge_device=""))
