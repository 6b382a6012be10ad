"""Plots of equal arguments are drawn once."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from socflower.report import plots, quality_section, report


@pytest.fixture(autouse=True)
def plots_drawn_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.fixturenames:
        for module, name in (
            (quality_section, "quality_plot"),
            (report, "breakdown_plot"),
            (report, "heat_plots"),
            (report, "cut_plot"),
        ):
            monkeypatch.setattr(module, name, _once(getattr(module, name)))


_drawn: dict[str, Any] = {}


def _once(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return `draw` with a memory that lasts as long as the process; plots cannot be changed."""

    @functools.wraps(draw)
    def remembered(*arguments: Any, **settings: Any) -> Any:
        key = f"{draw.__name__}{plots.as_svg.__name__}{arguments!r}{settings!r}"
        if key not in _drawn:
            _drawn[key] = draw(*arguments, **settings)
        return _drawn[key]

    return remembered
