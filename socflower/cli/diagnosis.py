"""Checks of this machine's installation, with remedies for what is missing."""

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from socflower import _int8
from socflower.cli.heat import sensors_line
from socflower.engines.deployment.flower_processes import users_environment
from socflower.engines.deployment.private_network import private_network
from socflower.engines.installed import dependencies
from socflower.engines.names import num_cores
from socflower.hierarchy import weighted_average
from socflower.quantities import counted
from socflower.thermal.sensors.linux import LinuxSensors
from socflower.workloads.sources import data_names, load_data


def diagnose() -> list[dict[str, Any]]:
    """Return findings: name, status ("ok", "missing" or "broken"), detail, and a remedy if one is needed."""
    return [
        _machine(),
        *_versions(),
        _kernel(),
        *_int8_kernels(),
        *_rings(),
        _ray(),
        _sensors(),
        *(_data(name) for name in data_names()),
    ]


def _finding(name: str, status: str, detail: str, remedy: str = "") -> dict[str, Any]:
    return {"name": name, "status": status, "detail": detail, "remedy": remedy}


def _machine() -> dict[str, Any]:
    return _finding(
        "machine",
        "ok",
        f"{platform.machine()}, {counted(num_cores(), 'core')} usable, Python "
        f"{platform.python_version()}, torch {torch.__version__}",
    )


def _versions() -> Iterator[dict[str, Any]]:
    """Yield the installed, allowed and tested version of each package that has a tested version."""
    if not dependencies():
        outdated = "this installation's metadata is older than its code"
        yield _finding(
            "versions", "broken", outdated, "install socflower again: make setup, or pip"
        )
    for one in dependencies().values():
        # Another finding reports a missing extra.
        if one.installed is None:
            continue
        allowed = str(one.allowed) or "without a bound of ours"
        detail = f"{one.installed}; allowed {allowed}, tested {', '.join(one.tested)}"
        if not one.is_allowed:
            yield _finding(one.name, "broken", detail, f"pip install '{one.name}{one.allowed}'")
        elif one.is_tested:
            yield _finding(one.name, "ok", detail)
        else:
            yield _finding(one.name, "ok", f"{detail}: allowed, but not a tested version")


def _kernel() -> dict[str, Any]:
    models = [{"w": np.full(1003, value, np.float32)} for value in (1.0, 2.0, 6.0)]
    mean = weighted_average(models, [1.0, 1.0, 2.0])["w"]
    if np.array_equal(mean, np.full(1003, 3.75, np.float32)):
        return _finding("native kernels", "ok", "aggregation: loaded, self-test passed")
    return _finding(
        "native kernels",
        "broken",
        f"aggregation: self-test expected 3.75, got {mean[0]}",
        "reinstall: pip install --force-reinstall --no-deps socflower",
    )


def _int8_kernels() -> Iterator[dict[str, Any]]:
    """Yield one finding per kernel path of this build: passed its self-test here, or never executed here."""
    available = _int8.available_kernels()
    for name in _int8.compiled_kernels():
        title = f"int8 {name}"
        if name not in available:
            why = "compiled, not executed: this processor lacks its instructions"
            yield _finding(title, "ok", why)
            continue
        try:
            _int8.Engine(kernel=name)
        except RuntimeError as error:
            yield _finding(title, "broken", str(error), "set SOCFLOWER_KERNEL to another path")
        else:
            yield _finding(title, "ok", "self-test passed")
    try:
        chosen = _int8.Engine().kernel
    except (ValueError, RuntimeError) as error:
        yield _finding("int8 training", "broken", str(error), "unset SOCFLOWER_KERNEL")
    else:
        yield _finding("int8 training", "ok", f"uses {chosen}; SOCFLOWER_KERNEL names another path")


def _rings() -> Iterator[dict[str, Any]]:
    """Check the requirements of rings on real devices: gloo, gRPC, and Flower's services."""
    import grpc

    yield _gloo()
    detail = f"grpcio {grpc.__version__}; `socflower certificates` makes what it needs"
    yield _finding("ring over gRPC", "ok", detail)
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    commands = ("flower-superlink", "flower-supernode", "flwr")
    missing = [command for command in commands if shutil.which(command, path=path) is None]
    if missing:
        detail = f"{', '.join(missing)} not on the PATH"
        yield _finding("engine deployment", "missing", detail, "pip install flwr")
        return
    yield _finding("engine deployment", "ok", "SuperLink and SuperNode are here")
    yield _private_network()


def _private_network() -> dict[str, Any]:
    name = "private network"
    with private_network(users_environment()) as network:
        if not network.shared_because:
            detail = "the SuperLink of --engine deployment is out of others' reach"
            return _finding(name, "ok", detail)
        remedy = (
            "allow user namespaces, or run --engine deployment on a machine without other users: they "
            "could run programs as you"
        )
        return _finding(name, "missing", network.shared_because, remedy)


def _gloo() -> dict[str, Any]:
    name = "ring over gloo"
    try:
        from torch import distributed

        store, timeout = distributed.HashStore(), timedelta(seconds=10)
        group: Any = distributed.ProcessGroupGloo(store, 0, 1, timeout)
        group.allreduce([torch.ones(4)]).wait()
    except (ImportError, AttributeError, RuntimeError) as error:
        detail = f"torch.distributed has no gloo that works here: {error}"
        return _finding(name, "missing", detail, "use rings over gRPC, or a torch build with gloo")
    return _finding(name, "ok", "self-test passed; unencrypted, for networks that are trusted")


def _ray() -> dict[str, Any]:
    if find_spec("ray") is not None:
        return _finding("engine simulation", "ok", f"Ray {metadata.version('ray')}")
    return _finding(
        "engine simulation",
        "missing",
        "Ray is not installed; the engine local needs none",
        "pip install 'socflower[simulation]'",
    )


def _sensors() -> dict[str, Any]:
    name, sensors = "temperature sensors", LinuxSensors()
    found, reading = sensors.found, sensors.read()
    line = sensors_line(found)
    if reading.temperature_c is not None:
        return _finding(name, "ok", f"{line}; now {reading.temperature_c:.1f} °C")
    remedy = "none on most virtual machines; step times show heat there"
    if found.temperatures:
        first = found.temperatures[0]
        remedy = f"{first.name} {first.rejection}; `socflower heat` shows them all"
    return _finding(name, "missing", line, remedy)


def _data(name: str) -> dict[str, Any]:
    title = f"data {name}"
    try:
        return _finding(title, "ok", load_data(name).source)
    except Exception as error:
        # One failure must not hide the other findings.
        return _finding(title, "missing", str(error))
