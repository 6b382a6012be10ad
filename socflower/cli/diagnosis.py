"""Checks of this machine's installation, with remedies for what is missing."""

import os
import platform
import shutil
import sysconfig
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
from socflower.workloads import load_data


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
        *(_data(name) for name in ("digits", "mnist", "cifar10")),
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


def _versions() -> list[dict[str, Any]]:
    """Return the installed, allowed and tested version of each package that has a tested version."""
    if not dependencies():
        return [
            _finding(
                "versions",
                "broken",
                "this installation's metadata is older than its code",
                "install socflower again: make setup, or pip install",
            )
        ]
    findings = []
    for one in dependencies().values():
        # Another finding reports a missing extra.
        if one.installed is None:
            continue
        allowed = str(one.allowed) or "without a bound of ours"
        detail = f"{one.installed}; allowed {allowed}, tested {one.tested}"
        if not one.is_allowed:
            findings.append(
                _finding(one.name, "broken", detail, f"pip install '{one.name}{one.allowed}'")
            )
        elif one.is_tested:
            findings.append(_finding(one.name, "ok", detail))
        else:
            findings.append(
                _finding(one.name, "ok", f"{detail}: allowed, but not the tested version")
            )
    return findings


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


def _int8_kernels() -> list[dict[str, Any]]:
    """Return one finding per kernel path of this build: passed its self-test here, or never executed here."""
    available = _int8.available_kernels()
    findings = []
    for name in _int8.compiled_kernels():
        title = f"int8 {name}"
        if name not in available:
            findings.append(
                _finding(
                    title, "ok", "compiled, not executed: this processor lacks its instructions"
                )
            )
            continue
        try:
            _int8.Engine(kernel=name)
        except RuntimeError as error:
            findings.append(
                _finding(title, "broken", str(error), "set SOCFLOWER_KERNEL to another path")
            )
            continue
        findings.append(_finding(title, "ok", "self-test passed"))
    try:
        chosen = _int8.Engine().kernel
    except (ValueError, RuntimeError) as error:
        return [
            *findings,
            _finding("int8 training", "broken", str(error), "unset SOCFLOWER_KERNEL"),
        ]
    return [
        *findings,
        _finding("int8 training", "ok", f"uses {chosen}; SOCFLOWER_KERNEL names another path"),
    ]


def _rings() -> list[dict[str, Any]]:
    """Check the requirements of rings on real devices: gloo, gRPC, and Flower's services."""
    import grpc

    findings = [
        _gloo(),
        _finding(
            "ring over gRPC",
            "ok",
            f"grpcio {grpc.__version__}; `socflower certificates` makes what it needs",
        ),
    ]
    missing = [
        command
        for command in ("flower-superlink", "flower-supernode", "flwr")
        if shutil.which(
            command, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        )
        is None
    ]
    if missing:
        return [
            *findings,
            _finding(
                "engine deployment",
                "missing",
                f"{', '.join(missing)} not on the PATH",
                "pip install flwr",
            ),
        ]
    return [
        *findings,
        _finding("engine deployment", "ok", "SuperLink and SuperNode are here"),
        _private_network(),
    ]


def _private_network() -> dict[str, Any]:
    with private_network(users_environment()) as network:
        if not network.shared_because:
            return _finding(
                "private network",
                "ok",
                "the SuperLink of --engine deployment is out of others' reach",
            )
        return _finding(
            "private network",
            "missing",
            network.shared_because,
            "allow user namespaces, or run --engine "
            "deployment where nobody else has an account: they could run programs as you",
        )


def _gloo() -> dict[str, Any]:
    try:
        from torch import distributed

        group: Any = distributed.ProcessGroupGloo(
            distributed.HashStore(), 0, 1, timedelta(seconds=10)
        )
        group.allreduce([torch.ones(4)]).wait()
    except (ImportError, AttributeError, RuntimeError) as error:
        return _finding(
            "ring over gloo",
            "missing",
            f"torch.distributed has no gloo that works here: {error}",
            "use rings over gRPC, or a torch build with gloo",
        )
    return _finding(
        "ring over gloo", "ok", "self-test passed; unencrypted, for networks that are trusted"
    )


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
    sensors = LinuxSensors()
    found, reading = sensors.found, sensors.read()
    line = sensors_line(found)
    if reading.temperature_c is not None:
        return _finding("temperature sensors", "ok", f"{line}; now {reading.temperature_c:.1f} °C")
    if found.temperatures:
        return _finding(
            "temperature sensors",
            "missing",
            line,
            f"{found.temperatures[0].name} "
            f"{found.temperatures[0].rejection}; `socflower heat` shows them all",
        )
    return _finding(
        "temperature sensors",
        "missing",
        line,
        "none on most virtual machines; step times show heat there",
    )


def _data(name: str) -> dict[str, Any]:
    if name != "digits" and "SOCFLOWER_DATA" not in os.environ and find_spec("datasets") is None:
        return _finding(
            f"data {name}",
            "missing",
            "SOCFLOWER_DATA is not set and the hub reader is not installed",
            "set SOCFLOWER_DATA to a folder of Parquet files, or pip install 'socflower[hub]'",
        )
    try:
        return _finding(f"data {name}", "ok", load_data(name).source)
    except Exception as error:
        # One failure must not hide the other findings.
        return _finding(f"data {name}", "missing", str(error))
