"""Engine `simulation`: the scenario's app under Flower's own simulation runtime, as `flwr run` starts it."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from socflower.engines.app_files import NUM_NODES_KEY, RUN_FOLDER_KEY, AppFiles
from socflower.engines.deployment.flower_processes import (
    await_end,
    flower_environment,
    free_ports,
    own_processes,
    require_command,
    start,
    tail,
    wait_until_healthy,
    write_connection,
)
from socflower.engines.deployment.process_guard import marked
from socflower.engines.run_folder import RunFolder
from socflower.errors import ConfigError, TrainingFailed

# Ray's default is 30 s, which is too short on a busy machine.
_RAY_START_TIMEOUT = {"RAY_raylet_start_wait_time_s": "180"}

__all__ = ["flower_environment", "run_in_flower_simulation", "running_superlink"]


def run_in_flower_simulation(folder: RunFolder, files: AppFiles, num_nodes: int) -> None:
    """Run the app of the scenario in `folder` on `num_nodes` virtual SuperNodes and wait for its outcome.

    Starts a SuperLink with its own home and port, and ends it with all its processes. Raises
    `ConfigError` if Flower's simulation extra is missing and `TrainingFailed` with the end of Flower's log.
    """
    if find_spec("ray") is None:
        raise ConfigError("engine simulation: needs Ray; pip install 'socflower[simulation]', or use --engine local")
    app = folder.path / "app"
    files.write(app, {RUN_FOLDER_KEY: str(folder.path), NUM_NODES_KEY: 0})
    environment = flower_environment(folder.path)
    with own_processes(folder.path) as mark:
        _submit(folder, app, num_nodes, {**_RAY_START_TIMEOUT, **marked(environment, mark), **_ray_authentication()})


def _ray_authentication() -> dict[str, str]:
    """Return the environment that makes Ray, which listens on all addresses of this machine, require a token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _submit(folder: RunFolder, app: Path, num_nodes: int, environment: dict[str, str]) -> None:
    with running_superlink(folder.path, environment):
        command = [
            "flwr", "run", str(app), "scenario", "--stream",
            "--federation-config", f"num-supernodes={num_nodes} client-resources-num-cpus=1",
        ]
        log = folder.path / "flwr-run.log"
        with log.open("wb") as stream:
            run = subprocess.Popen(command, env=environment, cwd=app, stdout=stream, stderr=subprocess.STDOUT)
            while folder.read_outcome() is None and run.poll() is None:
                time.sleep(0.2)
            await_end(run)
    if folder.read_outcome() is None:
        raise TrainingFailed(f"engine simulation: Flower ended without an outcome; the end of its log: {tail(log)}")


@contextmanager
def running_superlink(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a SuperLink for simulations within the context; `flwr run` knows it by the name `scenario`."""
    (port,), log = free_ports(1), folder / "superlink.log"
    write_connection(Path(environment["FLWR_HOME"]), "scenario", f"127.0.0.1:{port}")
    require_command("flower-superlink", environment, "simulation")
    # In its own session, so that Ray's processes end with it.
    process = start(["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess",
                     "--host", "127.0.0.1", "--port", str(port)], environment, log, folder)
    try:
        wait_until_healthy(port, process, log, "simulation")
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        await_end(process)
