"""The pages have every key of a scenario file, and no other."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from socflower.scenario.schema import config, split, thermal
from socflower.scenario.schema.file import _KEYS

DOCS = Path(__file__).parents[1] / "docs"
TABLES = {
    "[model]": config.ModelConfig, "[data]": config.DataConfig, "[train]": config.TrainConfig,
    "[precision]": config.PrecisionConfig, "[strategy]": config.StrategyConfig, "[ring]": config.RingConfig,
    "[thermal]": thermal.ThermalConfig, "[background_load]": thermal.BackgroundLoadConfig,
    "[[event]]": config.EventConfig, "[compare]": config.CompareConfig,
}


def keys_of(page: str, heading: str) -> set[str]:
    """Return the keys that the first table with a column `key` below a heading of a page has."""
    section = re.split(r"^## ", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)
    text = next(part for part in section if part.splitlines()[0] == heading)
    table = re.search(r"^\| key \|.*\n\|[ -|]*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, f"{page}, {heading}: no table of keys"
    return {name for row in table.group(1).splitlines() for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}


@pytest.mark.parametrize("heading", TABLES)
def test_a_tables_keys_are_in_the_page(heading: str) -> None:
    known = {field.name for field in fields(TABLES[heading]) if not field.name.startswith("_")}
    assert keys_of("scenario-files.md", heading) == known


def test_every_table_of_a_scenario_has_a_heading() -> None:
    headings = set(re.findall(r"^## \[+(\w+)", (DOCS / "scenario-files.md").read_text("utf-8"), re.MULTILINE))
    top = keys_of("scenario-files.md", "Top level")
    assert set(_KEYS) <= headings | top | {"board"}


def test_the_keys_of_the_cloud_are_in_their_page() -> None:
    text = (DOCS / "split-training.md").read_text("utf-8")
    rows = "\n".join(row.split("|")[1] for row in text.splitlines() if row.startswith("| `"))
    assert [field.name for field in fields(split.EdgeCloudConfig) if f"`{field.name}`" not in rows] == []
