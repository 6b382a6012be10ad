"""A user's app folder in Flower's own processes, with the records of its run: what `--engine` runs of an app folder.

Flower starts the ServerApp and the ClientApp of a generated app. They read from the run's folder which app they stand
for, load it from its folder, and hand it the run config and messages unchanged.
"""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from socflower.cluster import LayerProfile, ModelProfile
from socflower.cluster.cluster_file import load_cluster
from socflower.cluster.cost_model import BACKWARD_TO_FORWARD
from socflower.engines.app_files import NUM_NODES_KEY, RUN_FOLDER_KEY, AppFiles
from socflower.engines.app_metrics import PRICED_KEYS, MeteredGrid, RoundLog
from socflower.engines.local.message_log import MessageLog
from socflower.engines.local.run_app import load_flower_app, require_server_app, run_server_app
from socflower.engines.local.virtual_time_grid import VirtualTimeGrid
from socflower.engines.local.workers import handle, resolve_client_app
from socflower.engines.run_folder import RunFolder
from socflower.errors import ConfigError
from socflower.report.quality import final_figures
from socflower.scenario.app.main import await_nodes, report_outcome
from socflower.scenario.app.round_record import weights_sha256
from socflower.sim import EventClock, Trace

_SOURCE = '''"""The {part}App of an app folder that socflower runs."""

from socflower.scenario.app.own_app import {name}_app as app

__all__ = ["app"]
'''


def own_app_files() -> AppFiles:
    """Return the app that stands for the one that the run's folder names."""
    return AppFiles(
        server_app=_SOURCE.format(part="Server", name="server"),
        client_app=_SOURCE.format(part="Client", name="client"),
    )


def training_profile(training_flops: float | None) -> ModelProfile | None:
    """Return the cost of training a model of the app's; `ConfigError` unless it is above 0 and finite."""
    if training_flops is None:
        return None
    if not 0 < training_flops < math.inf:
        raise ConfigError(f"--training-flops {training_flops}: must be above 0 and finite")
    layer = LayerProfile(
        name="model",
        kind="foreign",
        forward_flops=training_flops / (1.0 + BACKWARD_TO_FORWARD),
        output_bytes=0.0,
        weight_bytes=0.0,
        num_tensors=0,
    )
    return ModelProfile(name="foreign", layers=(layer,), input_bytes=0.0)


def app_outcome(clock: EventClock, messages: MessageLog, rounds: RoundLog) -> dict[str, Any]:
    """Return the part of an app's result that follows from its clock, messages and metrics.

    `unknown` has the reason for each value that is None.
    """
    usage, events = clock.usage, messages.documents()
    entries = rounds.documents(events)
    scores, without = rounds.final_scores()
    unknown = {f"final_{name}": reason for name, reason in without.items()}
    if reason := rounds.without_strategy:
        unknown["strategy"] = reason
    if reason := rounds.without_weights:
        unknown["weights_sha256"] = reason
    outcome = {
        "strategy": rounds.strategy,
        "rounds": entries,
        **final_figures(scores),
        "virtual_s": clock.now_s,
        "energy_j": usage.total_energy_j,
        "bytes": usage.bytes_by_tier,
        "breakdown": {
            "soc_seconds": {key.value: value for key, value in usage.soc_seconds.items()},
            "energy_j": {key.value: value for key, value in usage.energy_j.items()},
        },
        "plan": rounds.plan,
        "weights_sha256": weights_sha256(rounds.arrays) if rounds.arrays else None,
        "events": events,
        "trained_on": {} if rounds.devices is None else rounds.devices.document(),
        "trained_in": sorted(
            map(_named_arithmetic, () if rounds.devices is None else rounds.devices.arithmetics)
        ),
        "priced_in": _named_arithmetic(rounds.priced_in),
        "notes": rounds.notes,
    }
    if messages.has_work and not clock.now_s:
        unknown |= dict.fromkeys(PRICED_KEYS, _without_price(rounds))
        outcome |= dict.fromkeys(PRICED_KEYS)
    return {**outcome, "unknown": dict(sorted(unknown.items()))}


def _without_price(rounds: RoundLog) -> str:
    """Return why nothing of a run took virtual time."""
    if rounds.has_groups:
        return (
            f"{rounds.strategy} has no costs=Costs(model_profile=profile_module(...)), so nothing has a price: add "
            "it, or give --training-flops"
        )
    if rounds.num_pushed:
        return "the app pushes its messages and pulls the replies, which has no price: call send_and_receive"
    return "no message of the app had a price"


def _named_arithmetic(arithmetic: str) -> str:
    return arithmetic or "fp32"


server_app: ServerApp = ServerApp()


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    folder = _folder(context)

    def outcome() -> dict[str, Any]:
        await_nodes(grid, int(context.run_config.get(NUM_NODES_KEY, 0)))
        named = folder.read_scenario()
        app = require_server_app(load_flower_app(Path(named["app"])).server_app)
        cluster, trace, messages = load_cluster(Path(named["cluster_file"])), Trace(), MessageLog()
        clock = EventClock(cluster, trace=trace)
        rounds = RoundLog(clock, on_round=folder.append_progress)
        priced = VirtualTimeGrid(
            grid, clock, cluster, model_profile=training_profile(named["training_flops"])
        )
        context.run_config = named["run_config"]
        run_server_app(app, MeteredGrid(priced, rounds, messages), context, messages, rounds)
        ended = app_outcome(clock, messages, rounds)
        trace.write(folder.trace)
        return ended

    report_outcome(folder, outcome)


class _OwnClientApp(ClientApp):
    """Passes each message to the ClientApp of the app that the run's folder names; failures have file and line."""

    def __call__(self, message: Message, context: Context) -> Message:
        app, run_config = _client(_folder(context))
        given, context.run_config = context.run_config, dict(run_config)
        try:
            return handle(app, message, context)
        finally:
            context.run_config = given


client_app: ClientApp = _OwnClientApp()


@cache
def _client(folder: RunFolder) -> tuple[ClientApp, Mapping[str, Any]]:
    named = folder.read_scenario()
    return resolve_client_app(load_flower_app(Path(named["app"])).client_app), named["run_config"]


def _folder(context: Context) -> RunFolder:
    return RunFolder(Path(str(context.run_config[RUN_FOLDER_KEY])))
