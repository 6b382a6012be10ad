"""Plots of equal arguments are drawn once, and become pictures only in tests that look at pictures."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from markupsafe import Markup

from socflower.report import plots, report
from socflower.report.summary import printable


@pytest.fixture
def drawn() -> None:
    """Ask for real pictures, drawn again."""


@pytest.fixture
def with_pictures() -> None:
    """Ask for real pictures, perhaps those of another test."""


@pytest.fixture(autouse=True)
def quick_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" in request.fixturenames:
        return
    if "with_pictures" not in request.fixturenames:
        monkeypatch.setattr(plots, "as_svg", _words)
    for name in ("quality_plot", "breakdown_plot", "heat_plots", "cut_plot"):
        monkeypatch.setattr(report, name, _once(getattr(report, name)))


def _words(drawing: Any, alt: str, prefix: str) -> Markup:
    return Markup('<svg role="img" aria-label="{}"></svg>').format(printable(alt))


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
