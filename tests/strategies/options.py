"""Short ways to write SoCFlow's settings in tests."""

from dataclasses import fields
from typing import Any

from socflower.strategies.settings import Costs, ExchangeSettings, TrainingSchedule


def grouped(**options: Any) -> dict[str, Any]:
    """Return the options of SoCFlow, with those that are fields of a settings value put into it."""
    for name, kind in (
        ("schedule", TrainingSchedule),
        ("costs", Costs),
        ("exchange", ExchangeSettings),
    ):
        # `exchange` is also the name of a field of its value.
        own = {
            entry.name: options.pop(entry.name)
            for entry in fields(kind)
            if entry.name in options and not isinstance(options[entry.name], kind)
        }
        if own:
            options[name] = kind(**own)  # type: ignore[arg-type]
    return options
