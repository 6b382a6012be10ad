"""The names of the engines, and limits on the processes that they start."""

import os
from importlib.util import find_spec

from socflower.errors import ConfigError

ENGINES = ("local", "simulation", "deployment")

MAX_WORKERS = 1024
"""Of processes or threads: more than the cores of any supported machine."""


def require_engine(engine: str) -> None:
    """Raise `ConfigError` for an unknown engine, and for "simulation" without Flower's extra of that name."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: unknown; use one of {', '.join(ENGINES)}")
    if engine == "simulation" and find_spec("ray") is None:
        raise ConfigError(
            "engine simulation: needs Ray; pip install 'socflower[simulation]', or use --engine local"
        )


def require_count(option: str, value: int | None, least: int, most: int) -> None:
    """Raise `ConfigError` for a number outside `least` to `most`."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{option} {value}: must be from {least} to {most}")


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
