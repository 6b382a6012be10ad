"""Generate docs/reference/combinations.md: which capabilities a scenario can combine, from the checks of a run.

Each cell of a table is a small scenario with two capabilities, checked as by `socflower run`. A test runs every cell.
"""

import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from socflower.errors import SocflowerError
from socflower.scenario.prepared_run import prepare
from socflower.scenario.schema.file import load_scenario, parse_scenario
from socflower.scenario.schema.scenario_file import Scenario

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "combinations.md"
ENGINES = ("local", "simulation", "deployment")


@dataclass(frozen=True, kw_only=True)
class Capability:
    """A capability: what a scenario says to have it, and whether one has it."""

    label: str
    says: str  # TOML
    is_in: Callable[[Scenario], bool]
    chooses: str = ""  # what a scenario has one of: two that choose it are alternatives


@dataclass(frozen=True, kw_only=True)
class Family:
    """Capabilities of one way to train, and the scenario to which they are added."""

    title: str
    base: str
    capabilities: Mapping[str, Capability]


_HEAT = Capability(
    label="heat and fans",
    says='[thermal]\nfan = "fixed"\nrpm = 6000',
    is_in=lambda s: bool(s.thermal),
)
_USERS = Capability(
    label="background load",
    says='[background_load]\ngames = "tidal"\nstart_hour = 17.0',
    is_in=lambda s: s.background_load is not None,
)
_PREEMPTION = Capability(
    label="preemption",
    says='[[event]]\nkind = "preempt"\nsoc = 1\nround = 1',
    is_in=lambda s: any(event.kind == "preempt" for event in s.events),
)
_INT8 = Capability(
    label="int8",
    chooses="arithmetic",
    says='[precision]\narithmetic = "int8"',
    is_in=lambda s: s.precision.arithmetic == "int8",
)
_MIXED = Capability(
    label="mixed precision",
    chooses="arithmetic",
    says='[precision]\narithmetic = "mixed"\nheld_out = 16',
    is_in=lambda s: s.precision.arithmetic == "mixed",
)

GROUPS = Family(
    title="Groups",
    base="""
[cluster]
boards = 4
socs_per_board = 1
[data]
name = "digits"
[model]
name = "lenet5"
[train]
epochs = 1
batch_size = 32
learning_rate = 0.02
[strategy]
groups = 2
sync_interval_epochs = 0.5
""",
    capabilities={
        "int8": _INT8,
        "mixed": _MIXED,
        "heat": _HEAT,
        "users": _USERS,
        "preemption": _PREEMPTION,
        "rebalancing": Capability(
            label="re-balancing",
            says='[strategy]\nrebalance = "both"\nrebalance_steps = 2',
            is_in=lambda s: s.strategy.rebalance != "off",
        ),
        "servers": Capability(
            label="servers of a site",
            says="""
[cluster]
boards = 2
socs_per_board = 1
[site]
servers = 2
[strategy]
server_interval = 2
""",
            is_in=lambda s: s.site is not None,
        ),
        "outer": Capability(
            label="outer strategy",
            says='[strategy.outer]\nname = "fedadam"\narguments.eta = 0.01',
            is_in=lambda s: s.strategy.outer is not None,
        ),
        "auto": Capability(
            label='groups = "auto"',
            says='[strategy]\ngroups = "auto"',
            is_in=lambda s: s.kind.has_groups and s.strategy.groups == "auto",
        ),
        "overlap": Capability(
            label="overlapped exchange",
            says="[strategy]\noverlap_buckets = 4",
            is_in=lambda s: s.strategy.overlap_buckets > 1,
        ),
        "leaders": Capability(
            label="leaders in a ring",
            says='[strategy]\nleaders = "ring"',
            chooses="leaders",
            is_in=lambda s: s.kind.has_groups and "leaders" in s.strategy.model_fields_set,
        ),
        "between": Capability(
            label="compressed leaders",
            says='[strategy]\nleaders = "tree"\nleader_compression = "int8"',
            chooses="leaders",
            is_in=lambda s: s.strategy.leader_compression != "none",
        ),
        "quorum": Capability(
            label="late groups",
            says="[strategy]\nquorum = 0.5",
            is_in=lambda s: s.strategy.quorum < 1,
        ),
        "compression": Capability(
            label="compressed gradients",
            says='[strategy]\ncompression = "fp16"',
            is_in=lambda s: s.strategy.compression != "none",
        ),
        "server": Capability(
            label="parameter servers",
            says='[strategy]\nexchange = "server"',
            is_in=lambda s: s.exchange.exchange == "server",
        ),
        "local": Capability(
            label="data that stay",
            says='[data]\npartition = "dirichlet"\n[strategy]\nreshuffle = false',
            is_in=lambda s: s.kind.has_groups and not s.strategy.reshuffle,
        ),
        "dispatch": Capability(
            label="samples from the hub",
            says="[strategy]\ndispatch = true",
            is_in=lambda s: s.strategy.dispatch,
        ),
        "spares": Capability(
            label="spare SoCs",
            says="[strategy]\nsocs = 3\nuse_spares = true",
            is_in=lambda s: s.strategy.use_spares,
        ),
        "whole": Capability(
            label="preemption of whole groups",
            says='[strategy]\npreemption = "groups"\n' + _PREEMPTION.says,
            is_in=lambda s: s.strategy.preemption == "groups",
        ),
    },
)

SPLIT = Family(
    title="Split training",
    base="""
[cluster]
boards = 2
socs_per_board = 1
device = "snapdragon-865"
[data]
name = "digits"
[model]
name = "vgg-tiny"
[train]
epochs = 1
batch_size = 32
learning_rate = 0.02
[strategy]
name = "split-replay"
sync_interval_epochs = 0.5
socs = 2
[edgecloud]
link = "constant"
bytes_per_s = [1e6, 1e6]
""",
    capabilities={
        "int8": _INT8,
        "mixed": _MIXED,
        "heat": _HEAT,
        "users": _USERS,
        "preemption": _PREEMPTION,
        "uplink": Capability(
            label="shared uplink",
            says="[edgecloud]\nshared_bytes_per_s = [1e6, 1e6]",
            is_in=lambda s: s.split.shared_bytes_per_s is not None,
        ),
        "processors": Capability(
            label="few cloud processors",
            says="[edgecloud]\ncloud_processors = 1",
            is_in=lambda s: s.split.cloud_processors is not None,
        ),
        "turns": Capability(
            label="one cloud half",
            says='[edgecloud]\ncloud_model = "shared"',
            is_in=lambda s: s.split.cloud_model == "shared",
        ),
        "parties": Capability(
            label="parties with features",
            chooses="model",
            says="""
[model]
name = "click-model"
[data]
name = "clicks"
[train]
optimizer = "adam"
learning_rate = 0.01
batch_size = 2048
""",
            is_in=lambda s: s.model.name == "click-model",
        ),
        "reverse": Capability(
            label="generator in reverse",
            chooses="model",
            says="""
[strategy]
socs = 1
[model]
name = "digit-generator"
[train]
optimizer = "adam"
learning_rate = 0.002
""",
            is_in=lambda s: s.model.name == "digit-generator",
        ),
        "transfer": Capability(
            label="frozen layers",
            says='[edgecloud]\nfrozen = "3"',
            is_in=lambda s: bool(s.split.frozen),
        ),
    },
)
FAMILIES = (GROUPS, SPLIT)


def scenario_with(family: Family, *keys: str) -> Scenario:
    """Return the family's scenario with capabilities added; `ConfigError` if they cannot be in one scenario."""
    document = tomllib.loads(family.base)
    for key in keys:
        _add(document, tomllib.loads(family.capabilities[key].says))
    return parse_scenario(document, name="scenario", question="", where="scenario")


def _add(document: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            _add(document[key], value)
        else:
            document[key] = deepcopy(value)


def refusal(family: Family, *keys: str, engine: str = "local") -> str | None:
    """Return the line that refuses a run before anything starts, or None if it runs."""
    try:
        prepare(scenario_with(family, *keys), engine)
    except SocflowerError as error:
        return str(error).removeprefix("scenario ").removeprefix("scenario: ")
    return None


def are_alternatives(family: Family, *keys: str) -> bool:
    """Return whether a scenario can have only one of the capabilities."""
    chosen = [family.capabilities[key].chooses for key in keys if family.capabilities[key].chooses]
    return len(chosen) > len(set(chosen))


def cells() -> Iterator[tuple[Family, tuple[str, ...], str]]:
    """Yield every cell: capabilities and engine."""
    for family in FAMILIES:
        for pair in combinations(family.capabilities, 2):
            if not are_alternatives(family, *pair):
                yield family, pair, "local"
        for key in family.capabilities:
            for engine in ENGINES:
                yield family, (key,), engine


def page() -> str:
    """Return the page."""
    shipped = [load_scenario(path) for path in sorted((ROOT / "scenarios").glob("*.toml"))]
    return "\n".join(
        [
            "# What goes together",
            "",
            "Made by `make api` from the checks before a run; `make test-matrix` runs every cell, `make test-slow`",
            "some. ✓ works, ● has a shipped scenario, – is",
            "one or the other, a number is refused, with the line below.",
            "",
            *(line for family in FAMILIES for line in _section(family, shipped)),
        ]
    )


def _shipped_with(family: Family, pair: Sequence[str], shipped: Sequence[Scenario]) -> list[str]:
    """Return the names of shipped scenarios that have two capabilities."""
    return [
        each.name
        for each in shipped
        if each.kind.uses_cloud == (family is SPLIT)
        and all(family.capabilities[key].is_in(each) for key in pair)
    ]


def _section(family: Family, shipped: Sequence[Scenario]) -> Iterator[str]:
    lines: list[str] = []
    examples: list[str] = []
    keys = list(family.capabilities)

    def cell(*pair: str, engine: str = "local") -> str:
        if are_alternatives(family, *pair):
            return "–"
        line = refusal(family, *pair, engine=engine)
        if line is None:
            found = _shipped_with(family, pair, shipped) if len(pair) == 2 else []
            examples.extend(found[:1])
            return "●" if found else "✓"
        if line not in lines:
            lines.append(line)
        return str(lines.index(line) + 1)

    rows = [
        f"|{number + 1} {family.capabilities[key].label}|"
        + "|".join(cell(key, other) if other != key else "" for other in keys[:number])
        + "|" * (len(keys) - number)
        + "|".join(cell(key, engine=engine) for engine in ENGINES)
        + "|"
        for number, key in enumerate(keys)
    ]
    yield from (
        f"## {family.title}",
        "",
        "||"
        + "|".join(str(number) for number in range(1, len(keys)))
        + "||"
        + "|".join(ENGINES)
        + "|",
        "|---" * (len(keys) + len(ENGINES) + 1) + "|",
        *rows,
        "",
    )
    yield from (f"{number}. {line}" for number, line in enumerate(lines, 1))
    if examples:
        yield ""
        for name in sorted(set(examples)):
            has = next(
                [each.label for each in family.capabilities.values() if each.is_in(one)]
                for one in shipped
                if one.name == name
            )
            yield f"- [{name}](../../scenarios/{name}.toml): {', '.join(has)}"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.exit(0)
