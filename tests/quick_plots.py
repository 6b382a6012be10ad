"""Reports of tests have words for pictures, which take longer to draw than a small training takes."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from markupsafe import Markup

DRAWING = ("front", "heat_section", "pipeline_report", "plots", "split_section")


@pytest.fixture
def drawn() -> None:
    """Ask for real pictures, drawn again."""


@pytest.fixture
def with_pictures() -> None:
    """Ask for real pictures, perhaps those of another test."""


@pytest.fixture(autouse=True)
def quick_plots(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw nothing in modules that are loaded by now; one that the test loads draws in that test."""
    with pytest.MonkeyPatch.context() as patch:
        if not {"drawn", "with_pictures"} & {*request.fixturenames}:
            for name in DRAWING:
                if module := sys.modules.get(f"socflower.report.{name}"):
                    patch.setattr(module, "as_svg", _words)
        yield


def _words(drawing: Any, alt: str, prefix: str) -> Markup:
    from socflower.report.summary import (
        printable,
    )  # here: it loads the report, which few tests need

    return Markup('<svg role="img" aria-label="{}"></svg>').format(printable(alt))
