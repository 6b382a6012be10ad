"""What `socflower` exports: quick to import, typed, and listed in the docs."""

import subprocess
import sys
from pathlib import Path

import pytest

import socflower

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", socflower.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(socflower, name) is not None
    assert name in dir(socflower)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'socflower' has no attribute 'SocFlow'"):
        _ = socflower.SocFlow  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        from socflower import SocFlow  # type: ignore[attr-defined]  # noqa: F401


def test_importing_the_package_loads_neither_torch_nor_flower() -> None:
    program = "import sys, socflower; print([name for name in ('torch', 'flwr', 'numpy') if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "[]"


def test_stub_and_page_are_what_is_exported() -> None:
    ran = subprocess.run(
        [sys.executable, "docs/generate_reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_every_name_is_exported_once() -> None:
    names = [name for names in socflower._EXPORTS.values() for name in names]
    assert len(names) == len(set(names))
