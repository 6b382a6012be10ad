"""Engine `simulation`: the scenario's app under Flower's own simulation runtime, as `flwr run` starts it."""

import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from socflower.engines.app_files import NUM_NODES_KEY, RUN_FOLDER_KEY, AppFiles
from socflower.engines.deployment.flower_processes import (
    await_end,
    flower_environment,
    free_ports,
    marked,
    own_processes,
    start,
    tail,
)
from socflower.engines.deployment.superlink import CONNECTION, start_superlink
from socflower.engines.names import require_engine
from socflower.engines.run_folder import OUTCOME, RunFolder
from socflower.errors import TrainingFailed

# Ray's default is 30 s, which is too short on a busy machine.
_RAY_START_TIMEOUT = {"RAY_raylet_start_wait_time_s": "180"}


def run_in_flower_simulation(
    folder: RunFolder, files: AppFiles, num_nodes: int, num_workers: int
) -> None:
    """Run the app of the scenario in `folder` on `num_nodes` virtual SuperNodes and wait for its outcome.

    Ray runs `num_workers` processes, each one node at a time; each imports torch, which takes seconds. Starts a
    SuperLink with its own home and port, and ends it with all its processes. Raises `ConfigError` if Flower's
    simulation extra is missing and `TrainingFailed` with the end of Flower's log.
    """
    require_engine("simulation")
    app, log = folder.path / "app", folder.path / "flwr-run.log"
    files.write(app, {RUN_FOLDER_KEY: str(folder.path), NUM_NODES_KEY: 0})
    with own_processes(folder.path) as mark:
        # Ray listens on all addresses of this machine, so it has to require a token.
        environment = {
            **_RAY_START_TIMEOUT,
            **marked(flower_environment(folder.path), mark),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        with running_superlink(folder.path, environment):
            run = start(
                [
                    "flwr",
                    "run",
                    str(app),
                    CONNECTION,
                    "--stream",
                    "--federation-config",
                    f"num-supernodes={num_nodes} client-resources-num-cpus=1 init-args-num-cpus={num_workers}"
                    + gpu_resources(num_workers, *_gpus()),
                ],
                environment,
                log,
                app,
            )
            while folder.read(OUTCOME) is None and run.poll() is None:
                time.sleep(0.2)
            await_end(run)
    if folder.read(OUTCOME) is None:
        raise TrainingFailed(
            f"engine simulation: Flower ended without an outcome; the end of its log: {tail(log)}"
        )


def gpu_resources(num_workers: int, kind: str, count: int) -> str:
    """Return the setting that gives each worker a GPU, shared if there are fewer; Ray hides all others.

    Ray knows GPUs of CUDA alone: other kinds of accelerators are not hidden. Not executed on a GPU yet.
    """
    if kind != "cuda" or not count:
        return ""
    share = min(1.0, math.floor(1000 * count / num_workers) / 1000)
    return f" client-resources-num-gpus={share}"


def _gpus() -> tuple[str, int]:
    # Imported here, since it loads torch.
    from socflower.model_graph.torch_device import accelerator, num_devices

    found = accelerator()
    return ("", 0) if found is None else (found.type, num_devices())


@contextmanager
def running_superlink(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a SuperLink for simulations, with Ray, within the context."""
    superlink = start_superlink(
        folder,
        environment,
        free_ports(1)[0],
        "--simulation",
        "--isolation",
        "subprocess",
        engine="simulation",
    )
    try:
        yield
    finally:
        superlink.end()
