"""A paper's tables and figures from its `figures.toml`, and ours beside them."""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, SchemaVersion, Text
from socflower.toml_file import Table, read_table

Value: TypeAlias = float | bool
Compute: TypeAlias = Callable[[], Mapping[str, Value | str]]
"""Returns ours for each cell of an item by its key; a text where there is none, such as "out of memory"."""

PAPERS = ("asteroid",)

COMPARED, CALIBRATION = "compared", "calibration"
STATES = (COMPARED, CALIBRATION)
SCORED, OTHER_READING, NOT_COMPARABLE, UNPRINTED = (
    "scored",
    "other reading",
    "not comparable",
    "not printed",
)
USES = (SCORED, CALIBRATION, OTHER_READING, NOT_COMPARABLE, UNPRINTED)
"""Cells under another reading of the paper are compared, but not scored; those that the paper has in an image only, or
leaves out, have ours alone."""


class Cell(Table):
    """A number or a statement of a paper, or ours where it prints neither."""

    key: Text
    value: float | None = Field(None, description="a number of a table, or of the prose")
    says: bool | None = Field(
        None, description="a statement of the prose, and whether it is made or denied"
    )
    unit: str = ""
    use: Annotated[str, OneOf(USES)] = SCORED
    place: str = Field("", description="where it stands, if not where the item says")

    def check(self) -> None:
        """Refuse a cell that is neither a number nor a statement, unless neither is printed, or both."""
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
    note: str = ""
    cells: tuple[Cell, ...] = Field(alias="cell", min_length=1)

    def check(self) -> None:
        """Refuse cells of the same key."""
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
        """Return a table or figure; `ConfigError` lists them."""
        found = next((item for item in self.items if item.id == item_id), None)
        if found is None:
            raise ConfigError(
                f"paper {self.name}: has no {item_id!r}; there are "
                f"{', '.join(item.id for item in self.items)}"
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A cell of a paper, and ours."""

    cell: Cell
    ours: Value | str

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; None for statements, and where either is no number above 0."""
        if (
            self.cell.value is None
            or isinstance(self.ours, str | bool)
            or not self.cell.value > 0
            or not self.ours > 0
        ):
            return None
        return self.ours / self.cell.value

    @property
    def holds(self) -> bool | None:
        """Whether a statement of the paper holds for ours; None for numbers, and where ours is a text."""
        return (
            None
            if self.cell.says is None or isinstance(self.ours, str)
            else self.ours == self.cell.says
        )

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
    """Return a paper by name; `ConfigError` lists the names if there is none of that name."""
    if name not in PAPERS:
        raise ConfigError(f"paper {name!r} is unknown; there are {', '.join(PAPERS)}")
    file = resources.files(f"socflower.paper.{name}").joinpath("figures.toml")
    return read_table(Paper, tomllib.loads(file.read_text("utf-8")), f"figures of {name}")


def compare_item(paper: Paper, item: Item) -> tuple[Row, ...]:
    """Compute ours for a table or figure."""
    computed: Mapping[str, Compute] = import_module(f"socflower.paper.{paper.name}.items").COMPUTE
    ours = computed[item.id]()
    missing = [cell.key for cell in item.cells if cell.key not in ours]
    assert not missing, f"{item.id} computes no {missing}"
    return tuple(Row(cell=cell, ours=ours[cell.key]) for cell in item.cells)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperScore:
    """How near ours are, of scored cells only."""

    num_numbers: int
    num_without: int  # of them, cells for which ours is no number
    typical_factor: float | None  # exp of the median |log ratio|; None without numbers
    worst_factor: float | None
    num_statements: int
    num_held: int

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def score(rows: Sequence[Row]) -> PaperScore:
    """Return how near the scored rows are: 2.0 means that ours is half or twice the paper's."""
    scored = [row for row in rows if row.cell.use == SCORED]
    numbers = [row for row in scored if row.cell.value is not None]
    factors = sorted(abs(math.log(row.ratio)) for row in numbers if row.ratio is not None)
    statements = [row for row in scored if row.cell.says is not None]
    middle = len(factors) // 2
    median = (
        None
        if not factors
        else factors[middle]
        if len(factors) % 2
        else (factors[middle - 1] + factors[middle]) / 2
    )
    return PaperScore(
        num_numbers=len(numbers),
        num_without=len(numbers) - len(factors),
        typical_factor=None if median is None else math.exp(median),
        worst_factor=math.exp(factors[-1]) if factors else None,
        num_statements=len(statements),
        num_held=sum(bool(row.holds) for row in statements),
    )
