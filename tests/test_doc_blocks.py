"""The code blocks of the pages: they run, or are fragments whose names, commands, options and keys exist.

The word after a block's language says what happens to it:

- none: `python` and `sh` run in `make test`; `toml` is a whole scenario, cluster, device or fan file, and is
  loaded
- `slow`: runs in `make test-slow` only, after the page's other blocks
- `fragment`: is only read. Python must compile, and what it imports from socflower must exist; the `socflower` and
  `make` commands of `sh` must have their options, files and targets; keys and values of `toml` must suit the schema.
- `text` blocks are output or drawings; other languages are refused. One that stands right below a block that runs is
  what that block prints, or lines of it: the words are the same and the numbers within 5 %, since accuracies in FP32
  differ a little between processors with vectors of different widths

The blocks of a page run in order, Python in one namespace, in a folder of the page that has scenarios/, docs/ and
benchmarks/ in it. A Python or TOML block whose first line is a comment that is only a file name, such as `# app.py`, is
written to that file as well, and its functions whose names begin with `test_` are called. The `[project]`, `[tool]` and
`[superlink]` of other programs' files need only be TOML.
"""

import ast
import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {
    "python": ("", "slow", "fragment"),
    "sh": ("", "slow", "fragment"),
    "toml": ("", "fragment"),
    "text": ("",),
}
OTHER_PROGRAMS = {"build-system", "project", "superlink", "tool"}
EXPORTS = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Block(NamedTuple):
    page: Path
    line: int  # of its fence
    language: str
    mark: str
    text: str
    shown: "Block | None" = None  # the output right below a block that runs

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """The file that the block is written to as well."""
        found = re.match(r"# ([\w-][\w./-]*\.(?:py|toml))(?::|\n)", self.text)
        return found[1] if found and self.language in ("python", "toml") else None


@functools.cache
def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    blocks: list[Block] = []
    above = 0  # the line of the fence that closed the last block
    text = page.read_text("utf-8").splitlines()
    lines = iter(enumerate(text, 1))
    for number, line in lines:
        opening = re.match(r" *```(\w*) *(.*)$", line)
        if opening:
            inner = []
            for _, line in lines:
                if line.strip() == "```":
                    break
                inner.append(line)
            block = Block(
                page,
                number,
                opening[1],
                opening[2].strip(),
                textwrap.dedent("\n".join([*inner, ""])),
            )
            is_below = blocks and not any(between.strip() for between in text[above : number - 1])
            if (
                block.language == "text"
                and is_below
                and blocks[-1].language in ("python", "sh")
                and blocks[-1].mark != "fragment"
            ):
                blocks[-1] = blocks[-1]._replace(shown=block)
            blocks.append(block)
            above = number + len(inner) + 1
    return blocks


def ruled(*languages: str, mark: str | None = None) -> list[Any]:
    """Return the blocks of all pages with these languages and this mark, as parameters."""
    return [
        pytest.param(block, id=block.place)
        for page in PAGES
        for block in blocks_of(page)
        if block.language in languages and mark in (None, block.mark)
    ]


def pages_that_run(*marks: str) -> list[Any]:
    """Return the pages with a block of Python or shell that has one of these marks, as parameters."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if any(
            page == param.values[0].page and param.values[0].mark in marks
            for param in ruled("python", "sh")
        )
    ]


def test_every_block_says_what_it_is() -> None:
    unruly = [
        f"{block.place}: ```{block.language} {block.mark}".rstrip()
        for page in PAGES
        for block in blocks_of(page)
        if block.mark not in LANGUAGES.get(block.language, ())
    ]
    assert not unruly, f"{unruly}: use one of {LANGUAGES}"


# ------------------------------------------------------------------------------------------- blocks that run
@pytest.mark.few_cells(3)
@pytest.mark.parametrize("page", pages_that_run(""))
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_blocks(
        [block for block in blocks_of(page) if block.mark == ""], tmp_path, monkeypatch, capfd
    )


@pytest.mark.slow
# Trainings of minutes, of which a page may have several.
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("page", pages_that_run("slow"))
def test_the_slow_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_blocks(
        [block for block in blocks_of(page) if block.mark != "fragment"],
        tmp_path,
        monkeypatch,
        capfd,
    )


def run_blocks(
    blocks: list[Block],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Run a page's blocks in a folder, as a user would in the repository's: Python here, where torch is loaded."""
    import torch

    from socflower.strategies.presets import STRATEGIES

    for name in ("scenarios", "docs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    main = ModuleType("__main__")
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for variable, value in EXPORTS.items():
        monkeypatch.setenv(variable, value)
    threads, modules, strategies = torch.get_num_threads(), set(sys.modules), dict(STRATEGIES)
    try:
        for block in blocks:
            if block.file_name:
                (folder / block.file_name).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file_name).write_text(block.text, "utf-8")
            printed = ""
            if block.language == "python":
                capfd.readouterr()
                run_python(block, main)
                printed = capfd.readouterr().out
            elif block.language == "sh":
                printed = run_shell(block, monkeypatch, capfd)
            if block.shown:
                missing = first_missing(block.shown.text, printed)
                assert missing is None, (
                    f"{block.shown.place}: {missing!r} is not what the block prints now:\n{printed[-2000:]}"
                )
    finally:
        torch.set_num_threads(threads)
        STRATEGIES.clear()  # a page may register its own
        STRATEGIES.update(strategies)
        # Another page may have a file of the same name.
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


def run_python(block: Block, main: ModuleType) -> None:
    """Execute a block, and call the tests of a file of tests; a traceback names the page and its lines."""
    code = compile("\n" * block.line + block.text, str(block.page), "exec", dont_inherit=True)
    try:
        exec(code, main.__dict__)
        for name in (
            re.findall(r"^def (test_\w+)", block.text, re.MULTILINE) if block.file_name else ()
        ):
            main.__dict__[name]()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(block.page)]
        where = f"{block.page.relative_to(ROOT)}:{lines[-1]}"
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


def run_shell(
    block: Block, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> str:
    """Run a block and return what it prints; plain lines of socflower without a new interpreter, which loads torch."""
    from socflower.cli.main import main as socflower

    commands = list(commands_of(block.text))
    is_plain = block.mark == "" and not re.search(r"[|&;<>$()*]|\bsudo\b", block.text)
    if not is_plain or any(command[:1] != ["socflower"] for command in commands):
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        printed = ran.stdout[-2000:] + ran.stderr[-2000:]
        assert ran.returncode == 0, f"{block.place}: ended with {ran.returncode}\n{printed}"
        return ran.stdout + ran.stderr
    printed = ""
    for command in commands:
        monkeypatch.setattr(sys, "argv", command)
        capfd.readouterr()
        code: object = 0
        try:
            socflower()
        except SystemExit as end:
            code = end.code
        said = "".join(capfd.readouterr())
        assert not code, f"{block.place}: {shlex.join(command)} ended with {code}\n{said[-2000:]}"
        printed += said
    return printed


# --------------------------------------------------------------------------------------- what pages say that is printed
NUMBER = r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?"
TOLERANCE = 0.05


def first_missing(shown: str, printed: str) -> str | None:
    """Return the first line of a page that an output does not have after the lines before it, None if it has all.

    White space, the lines of tables and the width of the terminal do not count. Numbers may be off by `TOLERANCE`.
    """
    printed, begin = in_one_line(printed), 0
    for line in filter(None, map(in_one_line, shown.splitlines())):
        numbers = [as_number(text) for text in re.findall(NUMBER, line)]
        pattern = re.compile(f"({NUMBER})".join(map(re.escape, re.split(NUMBER, line))))
        found = next(
            (
                match
                for match in pattern.finditer(printed, begin)
                if all(
                    abs(as_number(now) - number) <= TOLERANCE * number
                    for now, number in zip(match.groups(), numbers, strict=True)
                )
            ),
            None,
        )
        if found is None:
            return line
        begin = found.end()
    return None


def in_one_line(text: str) -> str:
    """Return a text without line breaks and the lines of tables, durations in seconds: "1 min 09 s" is "69 s"."""
    text = " ".join(re.sub(r"[\u2500-\u257f]", " ", text).split())
    text = re.sub(
        r"\b(\d+) h (\d\d) min\b",
        lambda match: f"{int(match[1]) * 3600 + int(match[2]) * 60} s",
        text,
    )
    return re.sub(
        r"\b(\d+) min (\d\d) s\b", lambda match: f"{int(match[1]) * 60 + int(match[2])} s", text
    )


def as_number(text: str) -> float:
    """Return the value of a number as pages have it, with commas between thousands."""
    return float(text.replace(",", ""))


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("a step 104 ms", None),
        ("a step 100 ms\n3 169 ms", None),
        ("a step 106 ms", "a step 106 ms"),
        ("3 169 ms\na step 100 ms", "a step 100 ms"),
        ("a round 100 ms", "a round 100 ms"),
        ("an epoch 1 min 11 s and\n6.85 kJ", None),
        ("an epoch 2 min 11 s", "an epoch 131 s"),
        ("1,200 SoCs of vgg11", None),
        ("1,200 SoCs of vgg12", "1,200 SoCs of vgg12"),
        ("0 of 3", None),
        ("1 of 3", "1 of 3"),
    ],
)
def test_shown_lines_are_found_in_an_output_in_order_within_5_percent(
    shown: str, missing: str | None
) -> None:
    printed = "a\nstep 100 ms\n│ 3  │ 169 ms │\nan epoch 1 min 09 s and 6.85 kJ\n1,234 SoCs of vgg11\n0 of 3 faults\n"
    assert first_missing(shown, printed) == missing


# -------------------------------------------------------------------------------------- Python that does not run
@pytest.mark.parametrize("block", ruled("python", mark="fragment"))
def test_a_fragment_of_python_compiles_and_its_imports_exist(block: Block) -> None:
    tree = ast.parse("\n" * block.line + block.text, str(block.page))
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "socflower":
                    importlib.import_module(alias.name)
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "socflower"
        ):
            module = importlib.import_module(node.module or "")
            missing += [
                f"{block.page.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}"
                for alias in node.names
                if not hasattr(module, alias.name)
            ]
    assert not missing


# ---------------------------------------------------------------------------------------- shell that does not run
def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell text as words, without redirections, variables and `sudo` before them."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(?<!\S)(\d|&)?>{1,2}(&\d| *[^ ;|&]+)", "", line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
        lexer.whitespace_split = True  # "host:port" and "{}" are words
        words: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set("|&;()"):
                if words:
                    yield words
                words = []
            elif words or not (
                token in ("sudo", "nohup", "time", "do", "then") or re.match(r"[A-Z_]+=", token)
            ):
                words.append(token)


@pytest.mark.parametrize("block", ruled("sh", mark="fragment"))
def test_the_commands_of_a_fragment_of_shell_exist(block: Block) -> None:
    import click
    import typer.main

    from socflower.cli.main import app
    from socflower.scenario.schema.file import apply_override

    program: Any = typer.main.get_command(app)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for words in commands_of(block.text):
        here = f"{block.place}: {shlex.join(words)}"
        missing = [
            word
            for word in words
            if re.match(r"(scenarios|docs|benchmarks)/", word) and not (ROOT / word).exists()
        ]
        assert not missing, f"{here}: {missing} is not there"
        if Path(words[0]).name == "make":
            unknown = [
                word for word in words[1:] if re.fullmatch(r"[a-z-]+", word) and word not in targets
            ]
            assert not unknown, f"{here}: {unknown} is no target of Makefile"
        if Path(words[0]).name != "socflower":
            continue
        try:
            command, context = program, program.make_context("socflower", words[1:])
            while isinstance(command, click.Group):
                name, command, rest = command.resolve_command(
                    context, [*context._protected_args, *context.args]
                )
                context = command.make_context(name, rest, parent=context)
        except click.exceptions.Exit:  # of --help and --version
            continue
        except click.ClickException as error:
            raise AssertionError(f"{here}: {error.format_message()}") from None
        # Then `--set` is of an app's run config.
        if len(words) > 2 and (ROOT / words[2]).is_dir():
            continue
        overrides: dict[str, Any] = {}
        for override in context.params.get("set_") or ():
            apply_override(overrides, override)
        assert not mistakes_of(overrides), f"{here}: {mistakes_of(overrides)}"


# ------------------------------------------------------------------------------------------------------- TOML
def mistakes_of(document: dict[str, Any]) -> list[str]:
    """Return the unknown keys and wrong values in tables of a scenario; others may be missing."""
    from pydantic import ValidationError

    from socflower.cluster.device_catalog import DeviceFile
    from socflower.scenario.expectations import require_known_claims
    from socflower.scenario.schema.scenario_file import ScenarioFile

    # The name of a file.
    if isinstance(document.get("cluster"), str):
        document = {key: value for key, value in document.items() if key != "cluster"}
    require_known_claims(document.get("expect", {}), "")
    kind = DeviceFile if "link" in document else ScenarioFile
    try:
        kind.model_validate_json(json.dumps(document, default=str), by_alias=True, by_name=False)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors()
            if each["type"] not in ("missing", "value_error")
        ]
    return []


@pytest.mark.parametrize("block", ruled("toml"))
def test_a_toml_file_is_loaded_and_a_fragment_has_known_keys(
    block: Block,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from socflower.cluster import load_cluster
    from socflower.cluster.cluster_file import ClusterFile
    from socflower.cluster.device_catalog import read_device_file
    from socflower.errors import ConfigError
    from socflower.field_rules import keys_of
    from socflower.scenario.schema.file import load_scenario, scenario_cluster
    from socflower.thermal.fans.config import read_fan_file

    file = tmp_path / (block.file_name or "block.toml")
    file.parent.mkdir(exist_ok=True)
    file.write_text(block.text, "utf-8")
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    (tmp_path / "clusters").symlink_to(ROOT / "scenarios" / "clusters")
    monkeypatch.chdir(tmp_path)
    try:
        document = tomllib.loads(block.text)
        if OTHER_PROGRAMS & set(document):
            return
        if block.mark == "fragment":
            assert not mistakes_of(document), f"{block.place}: {mistakes_of(document)}"
        elif "cluster" not in document and "board" not in document and "device" in document:
            read_device_file(file)
        elif "fan" in document:
            read_fan_file(file)
        elif set(document) <= set(keys_of(ClusterFile)):
            load_cluster(file)
        else:
            scenario_cluster(load_scenario(file))
    except (ConfigError, tomllib.TOMLDecodeError) as error:
        raise AssertionError(f"{block.place}: {error}") from None
