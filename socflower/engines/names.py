"""The engines by name, and limits of what they start."""

from socflower.errors import ConfigError

ENGINES = ("local", "simulation", "deployment")

MOST_WORKERS = 1024
"""Processes or threads: more than any machine here has cores."""


def require_engine(engine: str) -> None:
    """Raise `ConfigError` for an engine that nobody knows."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: unknown; use one of {', '.join(ENGINES)}")


def require_count(option: str, value: int | None, least: int, most: int) -> None:
    """Raise `ConfigError` for a number that cannot be meant."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{option} {value}: must be from {least} to {most}")
