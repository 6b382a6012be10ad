"""The page of all keys is what the schema says, and every table of a scenario is explained."""

import re
from pathlib import Path

from socflower.cluster.toml_file import keys_of, table_of
from socflower.scenario.schema.config import ScenarioFile

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_every_key_of_a_scenario_has_a_description() -> None:
    tables = [("", ScenarioFile), *((key, table_of(entry.annotation)[0]) for key, entry in keys_of(ScenarioFile).items()
                                    if key not in ("device", "expect"))]
    for name, table in tables:
        for key, entry in keys_of(table).items() if table else ():
            assert entry.description or key == "expect" or table_of(entry.annotation)[0], f"[{name}] {key}"


def test_every_table_of_a_scenario_has_a_heading() -> None:
    headings = set(re.findall(r"^## \[+(\w+)", (DOCS / "scenario-files.md").read_text("utf-8"), re.MULTILINE))
    tables = {key for key, entry in keys_of(ScenarioFile).items() if table_of(entry.annotation)[0]}
    assert tables <= headings | {"board"}
