"""The ClientApp of the edges of a split scenario."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeAlias, cast

from flwr.app import Context
from flwr.clientapp import ClientApp

from socflower.clients.split.app import make_split_client_app
from socflower.clients.split.in_process import SplitSettings
from socflower.clients.split.remote_cloud import CloudLink, cloud_link
from socflower.edgecloud.split_program import SplitProgram
from socflower.engines.run_folder import RunFolder
from socflower.errors import ConfigError
from socflower.scenario.schema.file import from_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.split_setting import SplitSetting
from socflower.wire.codecs.error_feedback import Form
from socflower.wire.message_keys import PARTITION_ID
from socflower.workloads.data_source import DataSource

FolderOf: TypeAlias = Callable[[Context], RunFolder]

DELTA_BYTES = 512 << 20
"""Memory limit of delta coding for the samples' last features, at each end."""


def split_client_app(folder_of: FolderOf) -> ClientApp:
    """Return the ClientApp of the edges of the scenario in a run's folder."""

    def program(context: Context) -> SplitProgram:
        return _setting(folder_of(context)).workload.program

    def data(context: Context, party: int, num_parties: int) -> DataSource:
        return _setting(folder_of(context)).workload.samples(party)

    def cloud_data(context: Context, party: int, num_parties: int) -> DataSource:
        known = _setting(folder_of(context)).workload.cloud_samples(party)
        if known is None:
            raise ConfigError("split scenario: this workload has nothing in the cloud but features")
        return known

    def settings(context: Context) -> SplitSettings:
        return split_settings(_setting(folder_of(context)))

    def link(context: Context) -> CloudLink:
        folder = folder_of(context)
        setting, edge = _setting(folder), int(context.node_config[PARTITION_ID])
        own = cloud_link(context)
        # On one machine the connection is slowed down to the scenario's link; between machines it is not.
        return replace(
            own,
            decider=setting.decision_engine(edge),
            bandwidth_profile=setting.links[edge] if folder.read_cloud() is not None else None,
        )

    return make_split_client_app(
        program,
        data,
        cloud_data_fn=cloud_data,
        settings_fn=settings,
        link_fn=link,
        state_folder=lambda context: folder_of(context).clients_folder(context),
    )


def split_settings(setting: SplitSetting) -> SplitSettings:
    """Return the scenario's settings for the coding of features and gradients."""
    scenario: Scenario = setting.scenario
    table = scenario.split
    is_coded = table.is_coded(scenario.strategy.name)
    feedback = cast(Form, table.error_feedback) if is_coded and not table.delta else "none"
    return SplitSettings(
        feedback=feedback,
        delta_bytes=DELTA_BYTES if is_coded and table.delta else 0,
        window=setting.schedule,
    )


@cache
def _setting(folder: RunFolder) -> SplitSetting:
    return SplitSetting(from_document(folder.read_scenario()))
