"""The placement of a model's operators that `socflower profile` measured, read into a scenario (F17)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from socflower.errors import ConfigError
from socflower.scenario.measured_file import read_measured
from socflower.scenario.schema.scenario_file import Scenario

_KEY = "fp32_operators"


def placement_file(document: dict[str, Any], folder: Path) -> Path | None:
    """Return the file that the document names in place of operators, and take its name out; None if it names none."""
    table = document.get("precision")
    if not isinstance(table, Mapping) or not isinstance(table.get(_KEY), str):
        return None
    document["precision"] = {key: value for key, value in table.items() if key != _KEY}
    return folder / str(table[_KEY])


def with_placement(scenario: Scenario, file: Path) -> Scenario:
    """Return the scenario with the operators that a profile places in FP32.

    Of the profile's cells for the scenario's model and data, that whose batch size is nearest to the scenario's counts.
    Raises `ConfigError` for a file that cannot be read or has no such cell.
    """
    model, data, size = scenario.model.name, scenario.data.name, scenario.train.batch_size
    cells = read_measured(file, "socflower profile --out").get("cells")
    found = [
        cell
        for cell in (cells if isinstance(cells, list) else ())
        if isinstance(cell, Mapping) and (cell.get("model"), cell.get("data")) == (model, data)
    ]
    try:
        cell = min(found, key=lambda cell: abs(int(cell["batch_size"]) - size))
        placed = [str(each["name"]) for each in cell["operators"] if each["side"] == "fp32"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{file}: has no placement of {model} on {data}; measure one with `socflower profile --model {model} "
            f"--batch-size {size} --out FILE`, and name FILE.part.json"
        ) from None
    precision = {**scenario.precision.model_dump(exclude_unset=True), _KEY: tuple(placed)}
    return scenario.replaced(precision=precision)
