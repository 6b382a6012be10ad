"""Plans as plain values, for messages between processes of one version."""

import json
from dataclasses import asdict
from typing import Any

from socflower.errors import ConfigError
from socflower.pipeline.plan import PipelinePlan, Plan, Policy, Stage, Sync, TwoDPlan


def to_json(plan: Plan) -> str:
    """Return a plan as JSON."""
    return json.dumps(asdict(plan))


def from_json(text: str) -> Plan:
    """Return the plan of `to_json`; `ConfigError` where it is none."""
    try:
        values = json.loads(text)
        if "groups" in values:
            return TwoDPlan(groups=tuple(map(_pipeline, values["groups"])), sync=Sync(values["sync"]),
                            server=values["server"], planner=values["planner"])
        return _pipeline(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"pipeline record: is no plan ({error}); server and client run different versions of "
                          "socflower") from None


def _pipeline(values: dict[str, Any]) -> PipelinePlan:
    stages = tuple(Stage(**{**stage, "devices": tuple(stage["devices"]), "shares": tuple(stage["shares"])})
                   for stage in values["stages"])
    return PipelinePlan(**{**values, "stages": stages, "policy": Policy(values["policy"])})
