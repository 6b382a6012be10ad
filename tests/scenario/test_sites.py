"""Sites of several servers: what they change, and what they must not."""

from pathlib import Path
from typing import Any

import pytest

from socflower.cluster.cluster_file import SiteTable
from socflower.scenario.planning import plan_scenario
from socflower.scenario.schema.file import load_scenario
from tests.command_line import Socflower, is_mistake
from tests.scenario.small_runs import small_result

pytestmark = pytest.mark.usefixtures("on_few_digits")
ROOT = Path(__file__).parents[2]
TWO_SERVERS = SiteTable(servers=2)


def ran(site: SiteTable | None = None, **changes: Any) -> dict[str, Any]:
    boards = (1, 1) if site else (1, 1, 1, 1)
    return small_result(groups=4, interval=0.25, boards=boards, site=site, **changes)


@pytest.mark.slow
def test_servers_that_always_take_part_change_times_and_no_weights() -> None:
    flat, site = ran(leaders="star"), ran(leaders="star", site=TWO_SERVERS)
    assert site["weights_sha256"] == flat["weights_sha256"]
    assert [entry["loss"] for entry in site["rounds"]] == [
        entry["loss"] for entry in flat["rounds"]
    ]
    # Of four models two go up and down at the hub, and two to a leader on the other board of their server.
    assert site["bytes"]["hub"] == flat["bytes"]["hub"] / 2


@pytest.mark.slow
def test_servers_that_take_part_less_often_change_weights_and_send_less() -> None:
    often, seldom = ran(site=TWO_SERVERS), ran(site=TWO_SERVERS, server_interval=4)
    assert seldom["weights_sha256"] != often["weights_sha256"]
    assert seldom["bytes"]["hub"] == often["bytes"]["hub"] / 4


def test_the_plan_has_both_synchronisations() -> None:
    scenario = load_scenario(ROOT / "scenarios" / "two_servers.toml")
    predicted = plan_scenario(scenario)["predicted"]
    assert 0.0 < predicted["server_sync_s"] < predicted["sync_s"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["strategy.groups=1"], "there are 2, and 1 groups"),
        (['strategy.groups="auto"'], "server_interval = 4"),
        (["site={}"], "servers is missing"),
        (['strategy.outer={name="fedadam"}'], "server_interval = 4"),
    ],
)
def test_sites_that_cannot_be_are_refused(
    socflower: Socflower, changes: list[str], named: str
) -> None:
    options = " ".join(f"--set {change}" for change in changes)
    is_mistake(socflower(f"run two_servers {options}"), named)
