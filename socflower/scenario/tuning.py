"""The search of `compare --tune`: for each strategy the best combination of values of keys."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Any

from socflower.errors import ConfigError
from socflower.report.quality import Quality
from socflower.scenario.schema.config import own_settings_by_table
from socflower.scenario.schema.scenario_file import Scenario
from socflower.strategies.presets import STRATEGIES
from socflower.toml_file import parse_value


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Values of keys of `[train]` and `[strategy]` that a comparison tries for each strategy: every combination."""

    # Each key with its values.
    axes: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def key(self) -> str:
        """The keys, for people."""
        return ", ".join(key for key, _ in self.axes)

    def choices(self, strategy: str) -> tuple[dict[str, Any], ...]:
        """Return every combination of the keys' values; the last key changes first.

        Keys that the strategy does not read are left out, which may leave one empty combination.
        """
        unread = STRATEGIES[strategy].unread_keys
        read = [axis for axis in self.axes if axis[0] not in unread]
        keys = [key for key, _ in read]
        values_by_key = [values for _, values in read]
        choices = []
        for values in product(*values_by_key):
            choice = dict(zip(keys, values, strict=True))
            choices.append(choice)
        return tuple(choices)

    def value(self, choice: Mapping[str, Any]) -> Any:
        """Return a combination for documents: the value if there is one key, else a text."""
        if len(choice) == len(self.axes) == 1:
            return next(iter(choice.values()))
        return described(choice)

    def variant(self, scenario: Scenario, choice: Mapping[str, Any]) -> Scenario:
        """Return the scenario with a combination; `ConfigError` if it does not fit."""
        try:
            return with_choice(scenario, choice)
        except ConfigError as error:
            tried = " --tune ".join(f"{key}={value}" for key, value in choice.items())
            raise ConfigError(f"--tune {tried}: {error}") from None


def described(choice: Mapping[str, Any]) -> str:
    """Return a combination as a text."""
    return ", ".join(f"{key}={value}" for key, value in choice.items())


def with_choice(scenario: Scenario, choice: Mapping[str, Any]) -> Scenario:
    """Return the scenario with other values of keys of `[train]` and `[strategy]`."""
    of_train, of_strategy = own_settings_by_table(choice)
    return scenario.replaced(
        train=scenario.train.replaced(**of_train),
        strategy=scenario.strategy.replaced(**of_strategy),
    )


def parse_tuning(texts: Sequence[str]) -> Tuning:
    """Return the search of `--tune key=value,value`, given once for each key.

    Raises `ConfigError` for an unknown key, for one that is given twice, and for less than two values.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, values = _axis(text)
        if key in axes:
            # A second search of the same key would silently replace the first.
            raise ConfigError(f"--tune {text}: {key} is given twice; give all its values at once")
        axes[key] = values
    return Tuning(axes=tuple(axes.items()))


def key_and_values(option: str, text: str) -> tuple[str, list[str]]:
    """Return the parts of KEY=VALUE,VALUE; `ConfigError` unless there are two or more values, all different."""
    key, _, values = text.partition("=")
    tried = [value.strip() for value in values.split(",")]
    different = {str(parse_value(value)) for value in tried}
    are_values = "" not in tried
    if not are_values or len(tried) < 2 or len(different) < len(tried):
        raise ConfigError(f"{option} {text}: write KEY=VALUE,VALUE, with different values")
    return key.strip(), tried


def _axis(text: str) -> tuple[str, tuple[Any, ...]]:
    key, tried = key_and_values("--tune", text)
    own_settings_by_table({key: ",".join(tried)}, f"--tune {text}")
    return key, tuple(map(parse_value, tried))


def search_seed(scenario: Scenario, reported: Collection[int]) -> int:
    """Return the seed of a search: the scenario's, or the next one that no reported run has."""
    return next(seed for seed in count(scenario.seed) if seed not in reported)


def best_of(results: Sequence[Mapping[str, Any]], quality: Quality) -> int:
    """Return the index of the first result at the target; if none reached it, of that with the best quality."""

    def order(index: int) -> tuple[float, float]:
        result = results[index]
        reached_s = result[quality.time_key]
        rank = quality.rank(result[quality.final_key])
        return (math.inf if reached_s is None else reached_s), rank

    return min(range(len(results)), key=order)
