"""What the pages name of the repository is there: files, folders, modules, anchors, benchmarks and exported names."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import socflower

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = sorted(
    [*(ROOT / "docs" / "examples").rglob("*.py"), *(ROOT / "scenarios").rglob("*.py")]
)
# Where a path of a page may begin, beside the page's own folder.
BASES = [ROOT, ROOT / "socflower", ROOT / "native", ROOT / "native" / "int8", ROOT / "scenarios"]
ENDINGS = (
    "py",
    "pyi",
    "toml",
    "cc",
    "h",
    "inc",
    "md",
    "proto",
    "json",
    "svg",
    "conf",
    "env",
    "service",
    "sh",
)
# Files that a reader has or makes, and that commands write.
READERS_OWN = {
    "comparison.json",
    "config.toml",
    "fan.toml",
    "my-board.toml",
    "path.toml",
    "result.json",
    "scenario.toml",
    "trace.json",
    "validation.json",
}
WRITTEN = ("/", "~", "$", "out/", "build/", "dist/", "my-app/", "my_app/", "http:", "https:")


def lines_of(page: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without the addresses of other sites."""
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        yield number, re.sub(r"https?://\S+", "", line)


@cache
def ours() -> tuple[frozenset[str], frozenset[str]]:
    """Return the repository's files and its folders; what was built or written by commands is none of it."""
    files = {path.name for path in ROOT.iterdir() if path.is_file()}
    for folder in ("benchmarks", "docs", "native", "scenarios", "socflower", "templates", "tests"):
        files |= {
            str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()
        }
    files = {name for name in files if "__pycache__" not in name}
    return frozenset(files), frozenset(
        str(parent) for name in files for parent in Path(name).parents
    )


def is_there(token: str, page: Path) -> bool:
    """Whether a path is a file or folder of the repository; one without a slash may be in any folder."""
    files, folders = ours()
    bare = token.strip("/")
    if token in written_by(page):
        return True
    if "/" not in bare:
        return any(
            name == bare or name.endswith(f"/{bare}")
            for name in (folders if token.endswith("/") else files)
        )
    places = [(base / bare).resolve() for base in (page.parent, *BASES)]
    names = {str(place.relative_to(ROOT)) for place in places if place.is_relative_to(ROOT)}
    return not names.isdisjoint(folders if token.endswith("/") else files | folders)


@cache
def written_by(page: Path) -> frozenset[str]:
    """Return the files that a page's blocks are, by the comment in their first line."""
    return frozenset(
        re.findall(r"^```\w+[ \w]*\n# (\S+\.\w+)$", page.read_text("utf-8"), re.MULTILINE)
    )


@cache
def first_folders() -> frozenset[str]:
    """Return the names with which a path of the repository, or of the package, begins."""
    return frozenset(
        path.name
        for base in (ROOT, ROOT / "socflower")
        for path in base.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )


def names_of_paths(line: str) -> Iterator[str]:
    """What looks like a path of the repository: it has one of its endings or begins with one of its folders."""
    for token in re.split(r"""[\s`"'()\[\],;=|]+""", line):
        token = token.partition("#")[0].rstrip(".:").partition("::")[0]
        has_ending = re.fullmatch(rf"[\w./-]+\.({'|'.join(ENDINGS)})", token)
        below_ours = re.fullmatch(r"(\w+)(/[\w.-]+)*/?", token) if "/" in token else None
        if (
            token.startswith(WRITTEN)
            or Path(token).name in READERS_OWN
            or re.match(r"(DIR|FILE|HOST|NAME)[/.]", token)
        ):
            continue
        if has_ending or (below_ours and below_ours.group(1) in first_folders()):
            yield token


@cache
def known_words() -> frozenset[str]:
    """Return the words of all sources, and of the programs in the pages."""
    files = [
        path
        for folder in ("socflower", "native", "benchmarks", "tests", "docs/examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".cc", ".h", ".toml")
    ]
    texts = [path.read_text("utf-8") for path in files if path != Path(__file__)]
    programs = [
        block
        for page in PAGES
        for block in re.findall(
            r"^```(?:python|sh).*?^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        )
    ]
    return frozenset(word for text in [*texts, *programs] for word in re.findall(r"\w+", text))


def module_is_there(name: str) -> bool:
    """Whether a dotted name is a module, or a module and a name in it; `socflower.X` may be any export."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1, len(parts) - 2):
        if length < 1:
            break
        path = ROOT.joinpath(*parts[:length])
        if any(
            found.exists() for found in (path, path.with_suffix(".py"), path.with_suffix(".pyi"))
        ):
            rest = parts[length:]
            if not rest:
                return True
            return hasattr(importlib.import_module(".".join(parts[:length])), rest[0])
    return False


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def imports(text: str) -> Iterator[tuple[int, str, str]]:
    """Lines, modules and names of what a text imports from socflower; it need not all be Python."""
    for match in re.finditer(
        r"^ *from (socflower[\w.]*) import (\([^)]*\)|[^\n#]+)", text, re.MULTILINE
    ):
        line = text.count("\n", 0, match.start()) + 1
        for name in re.findall(r"(\w+)(?: as \w+)?(?:,|\s*\)|\s*$)", match.group(2).strip("()")):
            yield line, match.group(1), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_a_page_exists(page: Path) -> None:
    missing = [
        f"{page.relative_to(ROOT)}:{number}: {token}"
        for number, line in lines_of(page)
        for token in names_of_paths(line)
        if not is_there(token, page)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_of_a_page_exists(page: Path) -> None:
    missing = [
        f"{page.relative_to(ROOT)}:{number}: {name}"
        for number, line in lines_of(page)
        for name in re.findall(r"(?<![\w./-])socflower(?:\.\w+)+", line)
        if name != "socflower.NAME" and not module_is_there(name)
    ]
    assert missing == []


def test_every_module_that_the_package_tells_of_exists() -> None:
    """Errors and docstrings name modules, too."""
    services = {"socflower.Ring", "socflower.split.Split", "socflower.split"}  # of gRPC
    missing = [
        f"{path.relative_to(ROOT)}:{number}: {name}"
        for path in sorted((ROOT / "socflower").rglob("*.py"))
        for number, line in lines_of(path)
        for name in re.findall(r"(?<![\w./-])socflower(?:\.\w+)+", line)
        if not path.name.endswith("_pb2.py") and name not in services and not module_is_there(name)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_class_and_call_of_a_page_is_known(page: Path) -> None:
    """A name in backticks that looks like a class or is called is a word of the sources, or of a page's programs."""
    others = {
        "CMakeLists",
        "InferenceSession",  # of onnxruntime
        "FedMedian",
        "TheWrapper",
    }  # the last two stand for strategies of the reader
    unknown = [
        f"{page.relative_to(ROOT)}:{number}: {name}"
        for number, line in lines_of(page)
        for quoted in re.findall(r"`([^`]+)`", line)
        for name in re.findall(r"\b[A-Z]+[a-z]\w*[A-Z]\w*|\b[a-z_]\w+(?=\()", quoted)
        if name not in known_words() and name not in others
    ]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target or not (path or anchor):
            continue
        other = (page.parent / path).resolve() if path else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_benchmark_of_a_page_exists(page: Path) -> None:
    named = re.findall(r"socflower bench ([a-z][\w-]*)", page.read_text("utf-8"))
    assert [
        name
        for name in named
        if not (ROOT / "benchmarks" / f"{name.replace('-', '_')}.py").exists()
    ] == []


@pytest.mark.parametrize("file", [*PAGES, *PROGRAMS], ids=lambda file: str(file.relative_to(ROOT)))
def test_what_is_exported_is_imported_by_the_public_door(file: Path) -> None:
    exported = set(socflower.__all__)
    text = file.read_text("utf-8")
    if file.suffix == ".py":
        ast.parse(text)
    wrong = []
    for line, module, name in imports(text):
        if name == "NAME":
            continue
        if module != "socflower" and name in exported:
            wrong.append(
                f"{file.relative_to(ROOT)}:{line}: {name} is `from socflower import {name}`"
            )
        elif not hasattr(importlib.import_module(module), name):
            wrong.append(f"{file.relative_to(ROOT)}:{line}: {module} has no {name}")
    assert wrong == []
