"""A paper's tables and figures from its `figures.toml`, beside our values."""

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from statistics import median
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, SchemaVersion, Text
from socflower.scenario.shipped import shipped_folder
from socflower.toml_file import Table, read_table

Value: TypeAlias = float | bool
Compute: TypeAlias = Callable[[], Mapping[str, Value | str]]
"""Returns our value for each cell of an item by its key, or a text such as "out of memory"."""

PAPERS = ("socflow", "socflow-plus", "asteroid", "edge-cloud", "mandheling")

SCORED, OTHER_READING, NOT_COMPARABLE, UNPRINTED = (
    "scored",
    "other reading",
    "not comparable",
    "not printed",
)
COMPARED, CALIBRATION, REPRODUCED, DIFFERS = "compared", "calibration", "reproduced", "differs"
STATES = (COMPARED, CALIBRATION, REPRODUCED, DIFFERS, NOT_COMPARABLE)
"""`reproduced` and `differs` are what `verdict` says of an item's rows, which the tests hold them to."""

WITHIN = 1.25
"""The most that a scored number of a reproduced item may be off, as a factor."""

USES = (SCORED, CALIBRATION, OTHER_READING, NOT_COMPARABLE, UNPRINTED)
"""Cells under another reading of the paper are compared, but not scored. Cells that the paper has only in an image have
only our value."""


class Cell(Table):
    """A number or a statement of a paper; with use "not printed" it is only ours."""

    key: Text
    value: float | None = Field(None, description="a number of a table, or of the prose")
    says: bool | None = Field(
        None, description="a statement of the prose, and whether it is made or denied"
    )
    unit: str = ""
    use: Annotated[str, OneOf(USES)] = SCORED
    place: str = Field("", description="the place in the paper, if it differs from the item's")

    def check(self) -> None:
        """Require a number or a statement, or neither for a cell that is not printed."""
        given = (self.value is not None) + (self.says is not None)
        if given != (self.use != UNPRINTED):
            raise ValueError(
                f"cell {self.key!r}: needs either value or says, or neither and use = {UNPRINTED!r}"
            )


class Item(Table):
    """A table or figure."""

    id: Text
    title: Text
    place: Text
    state: Annotated[str, OneOf(STATES)]
    note: str = Field("", description="why it differs or is not comparable, and what ours is")
    stored: tuple[str, ...] = Field(
        (), description="the files of docs/results that ours is read from"
    )
    cells: tuple[Cell, ...] = Field((), alias="cell")

    def check(self) -> None:
        """Refuse cells of the same key, an item without cells or a reason, and a state that its cells cannot have."""
        if not self.cells and self.state != NOT_COMPARABLE:
            raise ValueError(f"item {self.id!r}: needs at least one cell")
        if not self.note and self.state in (DIFFERS, NOT_COMPARABLE):
            raise ValueError(f"item {self.id!r}: {self.state!r} needs a note that says why")
        keys = [cell.key for cell in self.cells]
        if len(set(keys)) != len(keys):
            raise ValueError(f"item {self.id!r}: two cells have one key")


class Paper(Table):
    """All of a paper."""

    schema_version: SchemaVersion = Field(1, alias="schema")
    name: Text
    title: Text
    items: tuple[Item, ...] = Field(alias="item")

    def item(self, item_id: str) -> Item:
        """Return a table or figure; raises `ConfigError` for an unknown one."""
        items = {item.id: item for item in self.items}
        if item_id not in items:
            raise ConfigError(f"paper {self.name}: has no {item_id!r}; use one of {[*items]}")
        return items[item_id]

    def numbered(self, item_id: str) -> tuple[Item, ...]:
        """Return "figure-2", or its parts "figure-2a", "figure-2b" and so on."""
        parts = [
            item for item in self.items if re.fullmatch(f"{re.escape(item_id)}[a-z]?", item.id)
        ]
        return tuple(parts) or (self.item(item_id),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A cell of a paper, and our value."""

    cell: Cell
    ours: Value | str

    @property
    def ratio(self) -> float | None:
        """Our number over the paper's; None for statements, and unless both are above 0."""
        paper, ours = self.cell.value, self.ours
        if paper is None or isinstance(ours, str | bool) or not paper > 0 or not ours > 0:
            return None
        return ours / paper

    @property
    def holds(self) -> bool | None:
        """Whether a statement of the paper holds for ours; None for numbers, and if ours is a text."""
        if self.cell.says is None or isinstance(self.ours, str):
            return None
        return self.ours == self.cell.says

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        paper = self.cell.value if self.cell.says is None else self.cell.says
        return {
            "key": self.cell.key,
            "paper": paper,
            "ours": self.ours,
            "unit": self.cell.unit,
            "use": self.cell.use,
            "ratio": self.ratio,
            "holds": self.holds,
            "place": self.cell.place,
        }


@cache
def read_paper(name: str) -> Paper:
    """Return a paper by name; raises `ConfigError` for an unknown one."""
    if name not in PAPERS:
        raise ConfigError(f"paper {name!r} is unknown; use one of {[*PAPERS]}")
    file = resources.files(_package_of(name)).joinpath("figures.toml")
    return read_table(Paper, tomllib.loads(file.read_text("utf-8")), f"figures of {name}")


def compare_item(paper: Paper, item: Item) -> tuple[Row, ...]:
    """Compute our values for a table or figure, or read them from its stored results."""
    if not item.cells:
        return ()
    computed: Mapping[str, Compute] = import_module(f"{_package_of(paper.name)}.items").COMPUTE
    ours = computed[item.id]()
    missing = [cell.key for cell in item.cells if cell.key not in ours]
    assert not missing, f"{item.id} computes no {missing}"
    return tuple(Row(cell=cell, ours=ours[cell.key]) for cell in item.cells)


def _package_of(paper: str) -> str:
    return f"socflower.paper.{paper.replace('-', '_')}"


@cache
def stored_results(file: str) -> Mapping[str, Any]:
    """Return the document of a file in docs/results, which the wheel has as well."""
    path = shipped_folder("docs/results") / file
    return dict(json.loads(path.read_text("utf-8")))


def command_of(file: str) -> str:
    """Return the command that makes a file in docs/results again."""
    name = file.removeprefix("bench-").removesuffix(".json")
    return str(stored_results(file).get("command", f"socflower bench {name} --json"))


def stored_row(file: str, case: str, unit: str = "") -> Mapping[str, Any]:
    """Return the first row of a stored benchmark whose case and unit begin so."""
    for row in stored_results(file)["rows"]:
        if row["case"].startswith(case) and row["unit"].startswith(unit):
            return dict(row)
    raise AssertionError(f"{file} has no row {case!r} in {unit!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperScore:
    """The distance of our values from the paper's, over scored cells only."""

    num_numbers: int
    # Numbers of the paper for which our value is not a number.
    num_without: int
    # exp of the median |log ratio|; None without numbers.
    typical_factor: float | None
    worst_factor: float | None
    num_statements: int
    num_held: int

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def score(rows: Sequence[Row]) -> PaperScore:
    """Return the distance of the scored rows; a factor of 2.0 means that ours is half or twice the paper's."""
    scored = [row for row in rows if row.cell.use == SCORED]
    numbers = [row for row in scored if row.cell.value is not None]
    factors = sorted(abs(math.log(row.ratio)) for row in numbers if row.ratio is not None)
    statements = [row for row in scored if row.cell.says is not None]
    return PaperScore(
        num_numbers=len(numbers),
        num_without=len(numbers) - len(factors),
        typical_factor=math.exp(median(factors)) if factors else None,
        worst_factor=math.exp(factors[-1]) if factors else None,
        num_statements=len(statements),
        num_held=sum(bool(row.holds) for row in statements),
    )


def verdict(rows: Sequence[Row]) -> str:
    """Return whether rows reproduce the paper: each scored number within `WITHIN`, and all its statements hold."""
    found = score(rows)
    if not found.num_numbers + found.num_statements:
        return CALIBRATION if any(row.cell.use == CALIBRATION for row in rows) else NOT_COMPARABLE
    near = not found.num_without and (found.worst_factor or 1.0) <= WITHIN
    return REPRODUCED if near and found.num_held == found.num_statements else DIFFERS
