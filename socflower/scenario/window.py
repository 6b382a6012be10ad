"""Whether a training fits into the hours until a deadline: with how many SoCs, at which fan speed, by what margin."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from socflower.cluster import Cluster
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.quantities import counted, human_seconds
from socflower.scenario.heat import predicted_heat
from socflower.scenario.predicted_training import predicted_training
from socflower.scenario.schema.scenario_file import Scenario
from socflower.thermal.fans.fan_curve import rack_fans

_SPEEDS = 4
"""Of fans, from the slowest to the fastest, that are tried."""


def planned_window(
    scenario: Scenario, cluster: Cluster, start: datetime, deadline: datetime
) -> dict[str, Any]:
    """Return `start`, `deadline`, `window_s`, `choices` and `fits`: the part `window` of a plan document.

    A choice is the whole training on `num_socs` SoCs, all of the plan's and halves of them while these still fit, with
    `fan_rpm` (None without `[thermal]`), `training_s`, `margin_s` until the deadline, `epochs` that fit, and `fits`. It
    has the slowest of four fan speeds at which the training fits, else the fastest; without heat where even that is
    too long. Fans that follow a policy keep it. Starting the run, and users that the scenario does not have, are not
    counted.
    """
    window_s = (deadline - start).total_seconds()
    most = scenario.strategy.socs or cluster.num_socs
    choices: list[dict[str, Any]] = []
    while most:
        choice = _choice(scenario, cluster, most, window_s)
        if choice is not None:
            choices.append(choice)
        if choice is None or not choice["fits"] or choice["num_socs"] < most:
            break
        most //= 2
    return {
        "start": start.isoformat(timespec="minutes"),
        "deadline": deadline.isoformat(timespec="minutes"),
        "window_s": window_s,
        "choices": choices,
        "fits": any(choice["fits"] for choice in choices),
    }


def _choice(
    scenario: Scenario, cluster: Cluster, num_socs: int, window_s: float
) -> dict[str, Any] | None:
    """Return the training on so many SoCs; None if they cannot train it."""
    tried: dict[str, Any] | None = None
    for rpm, changed in _cooled(scenario):
        strategy = changed.strategy
        if "socs" not in strategy.kind.unread_keys and num_socs < cluster.num_socs:
            changed = changed.replaced(strategy=strategy.replaced(socs=num_socs))
        try:
            planned = predicted_training(changed, cluster)
            # What is too long without heat is not simulated with it, which takes long for long trainings.
            is_open = planned.duration_s <= window_s and changed.kind.has_groups
            heat = predicted_heat(changed, cluster) if is_open else None
        except (ConfigError, InfeasiblePlan):
            if tried is None and num_socs == (scenario.strategy.socs or cluster.num_socs):
                raise
            return None
        training_s = planned.duration_s if heat is None else heat["virtual_s"]
        tried = {
            "num_socs": len(planned.socs),
            "fan_rpm": rpm,
            "training_s": training_s,
            "margin_s": window_s - training_s,
            "epochs": int(scenario.train.epochs * window_s / training_s),
            "fits": training_s <= window_s,
        }
        if tried["fits"] or not is_open:
            break
    return tried


def _cooled(scenario: Scenario) -> Iterator[tuple[float | None, Scenario]]:
    """Yield the scenario at each speed of its fans, slow ones first; as it is without fans of one speed."""
    thermal, fans = scenario.thermal, rack_fans()
    if thermal is None or thermal.fan != "fixed":
        yield None, scenario
        return
    step = (fans.max_rpm - fans.min_rpm) / (_SPEEDS - 1)
    for rpm in (fans.min_rpm + step * number for number in range(_SPEEDS)):
        yield rpm, scenario.replaced(thermal=thermal.replaced(rpm=rpm))


def window_lines(window: Mapping[str, Any], epochs: int) -> Iterator[str]:
    """Yield the answer for people: will the window do, and with what."""
    hours = (
        f"{window['start'][11:]} to {window['deadline'][11:]}, {human_seconds(window['window_s'])}"
    )
    takes = f"the training takes {human_seconds(window['choices'][0]['training_s'])}"
    first, fewest = window["choices"][0], window["choices"][-1]
    if not window["fits"]:
        yield (
            f"the window from {hours} will not do: with {_with(first)} {takes} for "
            f"{counted(epochs, 'epoch')}; {first['epochs']} fit. `socflower run --deadline` trains these and keeps "
            "model and checkpoint"
        )
        return
    yield (
        f"the window from {hours} will do: with {_with(first)} {takes}, which leaves "
        f"{human_seconds(first['margin_s'])}"
    )
    enough = next(choice for choice in reversed(window["choices"]) if choice["fits"])
    if enough is not first:
        yield f"also with {_with(enough)}, which leaves {human_seconds(enough['margin_s'])}"
    if fewest is not enough:
        yield f"not with {_with(fewest)}: {human_seconds(-fewest['margin_s'])} too long"
    if first["fan_rpm"] is None:
        yield "no fan speed is chosen: the scenario has no [thermal] table with fans of one speed"


def _with(choice: Mapping[str, Any]) -> str:
    rpm = choice["fan_rpm"]
    return counted(choice["num_socs"], "SoC") + ("" if rpm is None else f" at {rpm:,.0f} rpm")
