"""The search of `compare --tune`: for each strategy the best of several values of a key of `[train]`."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from socflower.cluster.toml_file import keys_of, parse_value, unknown_key
from socflower.errors import ConfigError
from socflower.report.quality import Quality
from socflower.scenario.schema.config import Scenario, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Values of a key of `[train]` that a comparison tries for each strategy."""

    key: str
    values: tuple[Any, ...]

    def variant(self, scenario: Scenario, value: Any) -> Scenario:
        """Return the scenario with a value of the key; `ConfigError` if it does not fit."""
        try:
            return scenario.replaced(train=scenario.train.replaced(**{self.key: value}))
        except ConfigError as error:
            raise ConfigError(f"--tune {self.key}={value}: {error}") from None


def parse_tuning(text: str) -> Tuning:
    """Return the search of `--tune key=value,value`; `ConfigError` for an unknown key, and for less than two values."""
    key, separator, values = (part.strip() for part in text.partition("="))
    tried = tuple(parse_value(value.strip()) for value in values.split(","))
    if not separator or "" in tried or len(set(map(str, tried))) < max(2, len(tried)):
        raise ConfigError(f"--tune {text}: write a key of [train] and different values to try, as in "
                          "learning_rate=0.01,0.02,0.05")
    known = keys_of(TrainConfig)
    if key not in known:
        raise ConfigError(unknown_key(key, values, known, f"--tune {text}"))
    return Tuning(key=key, values=tried)


def search_seed(scenario: Scenario, reported: Collection[int]) -> int:
    """Return the seed that a search trains with: the first from the scenario's on that is not reported."""
    return next(seed for seed in count(scenario.seed) if seed not in reported)


def best_of(results: Sequence[Mapping[str, Any]], quality: Quality) -> int:
    """Return which result is best: the first to the target, or if none reached it, that of the best quality."""

    def order(result: Mapping[str, Any]) -> tuple[float, float]:
        reached_s = result[quality.time_key]
        return math.inf if reached_s is None else reached_s, quality.rank(result[quality.final_key])

    return min(range(len(results)), key=lambda index: order(results[index]))
