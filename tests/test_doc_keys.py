"""Every key of a scenario, and every argument and option of a command, is explained."""

import re
from pathlib import Path

from socflower.field_rules import keys_of, table_of
from socflower.scenario.expectations import _PLAN_QUANTITIES
from socflower.scenario.pipeline_planning import plan_of_pipeline
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import ScenarioFile

CLI = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"


def test_every_key_of_a_scenario_has_a_description() -> None:
    tables = [
        ("", ScenarioFile),
        *(
            (key, table_of(entry.annotation)[0])
            for key, entry in keys_of(ScenarioFile).items()
            if key not in ("device", "expect")
        ),
    ]
    for name, table in tables:
        for key, entry in keys_of(table).items() if table else ():
            assert entry.description or key == "expect" or table_of(entry.annotation)[0], (
                f"[{name}] {key}"
            )


def test_every_argument_and_option_of_a_command_has_a_description() -> None:
    """The page is made of the commands, so it shows which of them say nothing."""
    lines = re.findall(r"^- `[^`]+`(?: \([^)]*\))?: (.*)$", CLI.read_text("utf-8"), re.MULTILINE)
    assert len(lines) > 70
    assert [line for line in lines if line in ("", "None")] == []


def test_claims_and_keys_of_pipelines_are_in_the_reference(tmp_path: Path) -> None:
    """Every claim on a plan by its quantity, and every key of the plan's document, at every depth."""
    claims = (
        (CLI.parent / "scenarios.md")
        .read_text("utf-8")
        .partition("### [expect]")[2]
        .partition("## What")[0]
    )
    for name in _PLAN_QUANTITIES:
        kind, _, peer = name.rpartition("_over_")
        assert f"`{f'{kind}_over_X' if kind else name}`" in claims, name
        assert f"`{peer.removesuffix('-int8')}`" in claims and "`-int8`" in claims, name
    path = tmp_path / "case.toml"
    path.write_text(
        "[cluster]\nboards = 2\nsocs_per_board = 1\n[strategy]\nname = 'hybrid-pipeline'\n"
        "[expect]\nmin_devices = 1\n"
    )
    document, _ = plan_of_pipeline(load_scenario(path))
    page = (
        CLI.read_text("utf-8").partition("**`plan`**")[2].partition("**`bench`**")[0]
        + "`schema` `kind`"
    )
    missing = {key for key in keys_in({**document, "expectations": []}) if f"`{key}`" not in page}
    assert (
        missing
        - {"layers", "architecture", "planner", "model", "samples_on", "communication_bytes"}
        == set()
    )


def keys_in(value: object) -> set[str]:
    """Return the keys of all tables but of bytes by tier, which are described with results."""
    if isinstance(value, list):
        return set().union(*map(keys_in, value))
    if not isinstance(value, dict):
        return set()
    return set(value) | set().union(
        *(keys_in(inner) for key, inner in value.items() if key != "bytes")
    )
