"""What is allowed of other packages, what was tested, what pages say and what `doctor` says: one and the same."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import socflower
from socflower.cli.diagnosis import diagnose
from socflower.engines import installed as known
from socflower.engines.installed import Dependency, dependencies

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PINS = dict(
    re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
)
EXTRAS = PROJECT["optional-dependencies"]
FLOWER = next(
    Requirement(text) for text in PROJECT["dependencies"] if Requirement(text).name == "flwr"
)
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "docs/**/*.toml", "benchmarks/**/*.toml")
    for path in ROOT.glob(pattern)
]
PRIVATE = (
    (ROOT / "docs" / "architecture.md")
    .read_text("utf-8")
    .partition("## What is used that others do not")[2]
)
# Documented in spite of their names.
_PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_make", "_current_frames"}


def versions_of(extra: str) -> dict[str, str]:
    """Return the pinned version of each package of an extra."""
    return {
        pin.name: str(pin.specifier).removeprefix("==") for pin in map(Requirement, EXTRAS[extra])
    }


TESTED, ALSO_TESTED = versions_of("tested"), versions_of("also-tested")
FLOWERS = (TESTED["flwr"], ALSO_TESTED["flwr"])


def test_the_installed_metadata_is_that_of_the_project() -> None:
    assert dependencies().keys() == TESTED.keys(), "run make setup"
    assert dependencies()["flwr"].allowed == FLOWER.specifier, "run make setup"
    assert dependencies()["flwr"].tested == FLOWERS, "run make setup"


def test_what_was_tested_is_pinned_and_allowed() -> None:
    assert {name: PINS[name] for name in TESTED} == TESTED
    for name, dependency in dependencies().items():
        assert all(map(dependency.allowed.contains, dependency.tested)), name


def test_the_version_is_the_same_everywhere_and_in_the_changelog() -> None:
    version = PROJECT["version"]
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {version}\n" in citation
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert socflower.__version__ == version


def test_the_long_description_has_every_extra_of_users() -> None:
    rows = re.findall(r"^\| (`.*`) \|", (ROOT / PROJECT["readme"]).read_text("utf-8"), re.MULTILINE)
    ours = {"also-tested", "dev", "docs", "release", "tested"}
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == set(EXTRAS) - ours


def test_flower_is_bounded_by_the_minor_versions_that_were_tested() -> None:
    first, last = (version.split(".") for version in FLOWERS)
    assert FLOWER.specifier == SpecifierSet(
        f">={'.'.join(first[:2])},<{last[0]}.{int(last[1]) + 1}"
    )
    (simulation,) = map(Requirement, EXTRAS["simulation"])
    assert (simulation.name, simulation.specifier) == ("flwr", FLOWER.specifier)


def test_torch_is_bounded_below_by_the_oldest_minor_version_that_was_tested() -> None:
    oldest = ALSO_TESTED["torch"].rpartition(".")[0]
    assert SpecifierSet(f">={oldest},<3") == dependencies()["torch"].allowed


def test_pages_and_examples_allow_what_the_project_allows() -> None:
    named = [
        (path.name, text)
        for path in PAGES
        for text in re.findall(
            r"\bflwr(?:\[\w+\])?((?:[<>=~!]=?[\d.]+,?)+)", path.read_text("utf-8")
        )
    ]
    assert len(named) >= 4
    assert [
        (name, text)
        for name, text in named
        if SpecifierSet(text) != FLOWER.specifier and text != f"=={PINS['flwr']}"
    ] == []
    versions = [
        text
        for path in PAGES
        for text in re.findall(r"\bflwr (\d+\.\d+\.\d+)", path.read_text("utf-8"))
    ]
    assert versions and set(versions) <= set(FLOWERS)


@pytest.mark.few_cells(2)
@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        ("1.41.0", "ok", "1.41.0; allowed <1.43,>=1.41, tested 1.41.0, 1.42.0"),
        ("1.42.0", "ok", "1.42.0; allowed <1.43,>=1.41, tested 1.41.0, 1.42.0"),
        ("1.41.3", "ok", "not a tested version"),
        ("1.43.0", "broken", "1.43.0; allowed"),
        ("1.40.9", "broken", "1.40.9; allowed"),
    ],
)
def test_the_doctor_compares_what_is_here_with_what_is_allowed_and_tested(
    installed: str,
    status: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known, "_installed", lambda name: installed if name == "flwr" else None)
    dependencies.cache_clear()
    try:
        finding = next(finding for finding in diagnose() if finding["name"] == "flwr")
    finally:
        monkeypatch.undo()
        dependencies.cache_clear()
    assert finding["status"] == status and words in finding["detail"], json.dumps(finding)
    assert (status == "broken") == ("pip install 'flwr<1.43,>=1.41'" in finding["remedy"])


def test_another_build_of_a_tested_version_is_that_version() -> None:
    torch = Dependency(
        name="torch", installed="2.13.0+cpu", allowed=SpecifierSet(">=2.10,<3"), tested=("2.13.0",)
    )
    assert torch.is_tested and torch.is_allowed
    assert not Dependency(
        name="torch", installed="3.0.0", allowed=torch.allowed, tested=("2.13.0",)
    ).is_allowed


def foreign_private_names(path: Path) -> Iterator[str]:
    """Names of other packages' private modules, classes and attributes that a file uses."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    own = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }
    own |= {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    own |= {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for node in nodes:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.module.startswith("socflower")
        ):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"^(?:flwr|torch)(?:\.\w+)+$", node.value)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr not in own | _PUBLIC
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        ):
            names = [node.attr]
        else:
            continue
        for name in names:
            if re.search(r"(^|\.)_(?!_)", name) or re.match(
                r"flwr\.(?!app\b|serverapp\b|clientapp\b)", name
            ):
                yield name


@pytest.fixture(scope="module")
def used() -> dict[str, set[str]]:
    """Return what each file of the package uses of other packages' private parts."""
    return {
        path.relative_to(ROOT / "socflower").as_posix(): set(foreign_private_names(path))
        for path in (ROOT / "socflower").rglob("*.py")
        if not path.name.endswith("_pb2.py")
    }


def is_of_flower(name: str) -> bool:
    return name.startswith("flwr.") or name == "_mods"


def test_every_private_part_of_another_package_is_named_in_one_place(
    used: dict[str, set[str]],
) -> None:
    others = {name for name in set[str]().union(*used.values()) if not is_of_flower(name)}
    assert {"_buffers", "torch._dynamo"} <= others
    assert [name for name in sorted(others) if f"`{name}`" not in PRIVATE] == []


def test_one_file_adapts_to_flower_and_one_warms_its_executor(used: dict[str, set[str]]) -> None:
    users = {file for file, names in used.items() if any(map(is_of_flower, names))}
    assert users == {"flower_adapter.py", "engines/deployment/warm_executor.py"}
    assert all(f"`{file}`" in PRIVATE.replace("socflower/", "") for file in users)
