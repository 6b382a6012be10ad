"""Engine `simulation`: the scenario's app under Flower's own simulation runtime, as `flwr run` starts it."""

import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from socflower.errors import ConfigError, TrainingFailed
from socflower.scenario.run_folder import RunFolder

_START_TIMEOUT_S = 90.0
_APP = {
    "server_app.py": '"""The ServerApp of every socflower scenario."""\n\n'
                     "from socflower.scenario.app import server_app as app\n\n__all__ = [\"app\"]\n",
    "client_app.py": '"""The ClientApp of every socflower scenario."""\n\n'
                     "from socflower.scenario.app import client_app as app\n\n__all__ = [\"app\"]\n",
    "pyproject.toml": """[build-system]
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
run-folder = ""
""",
}


def run_in_flower_simulation(folder: RunFolder, num_nodes: int) -> None:
    """Run the scenario that stands in `folder` on `num_nodes` virtual SuperNodes and wait for its outcome.

    Starts a SuperLink of its own with its own home and port, and ends it; nothing is left running. Raises
    `ConfigError` where Flower's simulation extra is missing and `TrainingFailed` with the end of Flower's log.
    """
    if find_spec("ray") is None:
        raise ConfigError("engine simulation: needs Ray; pip install 'socflower[simulation]', or use --engine local")
    app = folder.path / "app"
    app.mkdir()
    for name, text in _APP.items():
        (app / name).write_text(text, "utf-8")
    environment = flower_environment(folder.path)
    with running_superlink(folder.path, environment):
        command = [
            "flwr", "run", str(app), "scenario", "--stream", "--run-config", f'run-folder="{folder.path}"',
            "--federation-config", f"num-supernodes={num_nodes} client-resources-num-cpus=1",
        ]
        log = folder.path / "flwr-run.log"
        with log.open("wb") as stream:
            run = subprocess.Popen(command, env=environment, cwd=app, stdout=stream, stderr=subprocess.STDOUT)
            while folder.read_outcome() is None and run.poll() is None:
                time.sleep(0.2)
            _end(run)
    if folder.read_outcome() is None:
        raise TrainingFailed(f"engine simulation: Flower ended without an outcome; its last words: {_tail(log)}")


def flower_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which Flower's commands work in `folder`, apart from the user's own Flower."""
    return {
        **os.environ, "FLWR_HOME": str(folder / "flwr-home"), "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Else Flower makes a fresh environment for each run and installs the app's dependencies into it.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    }


@contextmanager
def running_superlink(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Keep a SuperLink for simulations running, known to `flwr run` by the name `scenario`."""
    port, log, home = _free_port(), folder / "superlink.log", Path(environment["FLWR_HOME"])
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "scenario"\n\n[superlink.scenario]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess",
               "--host", "127.0.0.1", "--port", str(port)]
    if shutil.which(command[0], path=environment["PATH"]) is None:
        raise ConfigError("engine simulation: flower-superlink is not on the PATH; pip install 'socflower[simulation]'")
    with log.open("wb") as stream:
        # A session of its own: Ray's many processes end with it.
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT,
                                   start_new_session=True, cwd=folder)
        try:
            _wait_until_healthy(port, process, log)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            _end(process)


def _wait_until_healthy(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TrainingFailed(f"engine simulation: the SuperLink ended at its start: {_tail(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TrainingFailed(f"engine simulation: the SuperLink was not ready after {_START_TIMEOUT_S:g} s: {_tail(log)}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:]) if lines else "(its log is empty)"
