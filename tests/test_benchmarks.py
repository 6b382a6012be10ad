"""No benchmark is left behind by a change of the library: nothing else imports most of them."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_all_benchmarks_can_be_imported() -> None:
    # Those in folders of apps are imported by Flower, from there.
    files = [
        file
        for file in sorted((ROOT / "benchmarks").rglob("*.py"))
        if not file.parent.name.endswith("app") and file.name != "__main__.py"
    ]
    assert len(files) > 40
    for file in files:
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
