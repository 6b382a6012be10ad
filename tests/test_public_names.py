"""What `socflower` exports: quick to import, typed, and listed in the docs."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import socflower

ROOT = Path(__file__).parents[1]


def test_every_exported_name_is_there() -> None:
    missing = [name for name in socflower.__all__ if getattr(socflower, name, None) is None]
    assert missing == []
    assert set(socflower.__all__) <= set(dir(socflower))


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


def test_stub_and_pages_are_what_is_exported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))
    monkeypatch.setattr(sys, "argv", ["generate_reference.py", "--check"])
    assert generator["main"]() == 0, capsys.readouterr().err


def test_every_name_is_exported_once() -> None:
    names = [name for names in socflower._EXPORTS.values() for name in names]
    assert len(names) == len(set(names))
