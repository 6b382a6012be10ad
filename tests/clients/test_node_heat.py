"""Limits of heat as an operator writes them."""

from dataclasses import fields
from typing import Any

import pytest

from socflower.clients.heat_mod import node_heat_limits
from socflower.thermal.limits import HeatLimits
from tests.one_line import refused


def test_a_node_that_says_nothing_of_heat_does_not_mind_it() -> None:
    assert node_heat_limits({"board": 0, "slot": 1}) is None
    assert node_heat_limits({"heat": False}) is None


def test_every_limit_can_be_given_and_the_others_keep_their_defaults() -> None:
    assert node_heat_limits({"heat": True}) == HeatLimits()
    limits = node_heat_limits(
        {"heat": True, "heat-resume-c": 40, "heat-shrink-c": 50.5, "heat-pause-c": 60}
    )
    assert limits == HeatLimits(resume_c=40.0, shrink_c=50.5, pause_c=60.0)
    for entry in fields(HeatLimits):
        value = getattr(HeatLimits(), entry.name)
        assert (
            node_heat_limits({"heat": True, f"heat-{entry.name.replace('_', '-')}": value})
            == HeatLimits()
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"heat": "yes"}, "heat = 'yes'"),
        ({"heat": True, "heat-pause": 80}, "heat-resume-c"),
        ({"heat-pause-c": 80.0}, "heat-pause-c"),
        ({"heat": False, "heat-pause-c": 80.0}, "heat-pause-c"),
        ({"heat": True, "heat-pause-c": "hot"}, "heat-pause-c"),
        ({"heat": True, "heat-max-user-load": True}, "heat-max-user-load"),
        ({"heat": True, "heat-pause-c": 20.0}, "resume_c"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    refused(lambda: node_heat_limits(config), message)
