"""Every key of a scenario, and every argument and option of a command, is explained."""

import re
from pathlib import Path

from socflower.cluster.toml_file import keys_of, table_of
from socflower.scenario.schema.config import ScenarioFile

CLI = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"


def test_every_key_of_a_scenario_has_a_description() -> None:
    tables = [("", ScenarioFile), *((key, table_of(entry.annotation)[0]) for key, entry in keys_of(ScenarioFile).items()
                                    if key not in ("device", "expect"))]
    for name, table in tables:
        for key, entry in keys_of(table).items() if table else ():
            assert entry.description or key == "expect" or table_of(entry.annotation)[0], f"[{name}] {key}"


def test_every_argument_and_option_of_a_command_has_a_description() -> None:
    """The page is made of the commands, so it shows which of them say nothing."""
    lines = re.findall(r"^- `[^`]+`(?: \([^)]*\))?: (.*)$", CLI.read_text("utf-8"), re.MULTILINE)
    assert len(lines) > 70
    assert [line for line in lines if line in ("", "None")] == []
