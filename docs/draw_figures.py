"""Draw the figures of the concepts from the traces of real runs, and record a terminal; `make figures` runs it.

Each figure is drawn twice, for light and dark pages.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from draw_picture import COLOURS, GRID, INK, STYLE
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FIGURES = Path(__file__).parent / "figures"
SOCFLOWER = Path(sys.executable).with_name("socflower")
SCENARIO = FIGURES / "three_boards.toml"
SOCS_PER_BOARD = 5
SHARED = "#8a8f98"
SESSION = (
    "socflower new my-app",
    "socflower run my-app --cluster my-app/cluster.toml",
    "socflower plan my-app --cluster my-app/cluster.toml",
)
COLUMNS = 76
PANELS = {"true": "In turns", "false": "Running freely"}


class Run(NamedTuple):
    """A run's plan of groups, and the spans of its trace in milliseconds, by row."""

    groups: Sequence[Mapping[str, Any]]
    rows: Mapping[str, Sequence[tuple[str, float, float]]]


def main() -> None:
    """Write the figures, or with `terminal` the recorded terminal, into docs/figures."""
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:] == ["terminal"]:
            record(SESSION, Path(folder))
            return
        runs = {turns: trained(turns, Path(folder) / turns) for turns in PANELS}
    draw("turns", (9, 5.6), partial(draw_turns, runs))
    draw("step", (9, 3.4), partial(draw_step, runs["false"]))


def trained(turns: str, out: Path) -> Run:
    """Run the scenario, and return its plan and trace."""
    setting = f"strategy.uplink_turns={turns}"
    run = [str(SOCFLOWER), "run", str(SCENARIO), "--out", str(out), "--set", setting]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    events = json.loads((out / "trace.json").read_text("utf-8"))["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    rows: dict[str, list[tuple[str, float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            span = (event["name"], event["ts"] / 1e3, event["dur"] / 1e3)
            rows.setdefault(names[event["pid"], event["tid"]], []).append(span)
    return Run(json.loads((out / "result.json").read_text("utf-8"))["plan"]["groups"], rows)


def draw(name: str, size: tuple[float, float], onto: Any) -> None:
    """Write one figure for light and for dark pages; `onto` draws on a figure with colours of groups and ink."""
    of_ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    for theme, colours in COLOURS.items():
        style = STYLE | dict.fromkeys(of_ink, INK[theme]) | {"grid.color": GRID[theme]}
        with rc_context({**style, "font.size": 13}):
            figure = Figure(figsize=size, layout="constrained")
            onto(figure, colours)
            path = FIGURES / f"{name}-{theme}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def draw_turns(runs: Mapping[str, Run], figure: Figure, colours: Sequence[str]) -> None:
    """Draw the groups on their boards, and below who computes and who has the uplink, in turns and freely."""
    top, *panels = figure.subplots(3, 1, height_ratios=[1.2, 2, 2])
    draw_boards(top, runs["true"].groups, colours)
    rows = {
        "group 0 computes": "SoC 0 cpu",
        "group 2 computes": "SoC 6 cpu",
        "board 1's uplink": "board1/up",
    }
    end_ms = 2 * max(step_ms(run.rows["SoC 0 cpu"]) for run in runs.values())
    for axes, (turns, title) in zip(panels, PANELS.items(), strict=True):
        draw_rows(axes, runs[turns], rows, end_ms, colours)
        axes.set_title(title, loc="left", fontsize=13)
    panels[-1].set_xlabel("virtual milliseconds")


def draw_step(run: Run, figure: Figure, colours: Sequence[str]) -> None:
    """Draw a step of the first group, whose members are on two boards: who computes, and which links are in use."""
    rows = {
        "SoC 0 computes": "SoC 0 cpu",
        "SoC 0's link": "soc0/tx",
        "SoC 1's link": "soc1/tx",
        "board 0's uplink": "board0/up",
        "SoC 5 computes": "SoC 5 cpu",
        "SoC 5's link": "soc5/tx",
        "board 1's uplink": "board1/up",
    }
    axes = figure.subplots()
    draw_rows(axes, run, rows, 1.3 * step_ms(run.rows["SoC 0 cpu"]), colours)
    axes.set_xlabel("virtual milliseconds")


def step_ms(spans: Iterable[tuple[str, float, float]]) -> float:
    """Return how long the first step of a SoC takes."""
    starts = [start for name, start, _ in spans if name.endswith("compute")]
    return starts[1] - starts[0]


def draw_boards(axes: Axes, groups: Sequence[Mapping[str, Any]], colours: Sequence[str]) -> None:
    """Draw a square for each SoC in its group's colour, board by board."""
    for group in groups:
        for soc in group["members"]:
            board, slot = divmod(soc, SOCS_PER_BOARD)
            at = (6 * board + slot, 0)
            axes.add_patch(Rectangle(at, 0.9, 0.9, color=colours[group["id"]]))
            name = f"{group['id']}*" if soc == group["leader"] else str(group["id"])
            axes.text(
                at[0] + 0.45, 0.45, name, ha="center", va="center", color="white", weight="bold"
            )
    for board in range(3):
        axes.text(6 * board + 2.45, 1.3, f"board {board}", ha="center")
    axes.set(xlim=(-0.2, 17.2), ylim=(-0.2, 1.9), aspect="equal")
    axes.set_axis_off()


def draw_rows(
    axes: Axes, run: Run, rows: Mapping[str, str], end_ms: float, colours: Sequence[str]
) -> None:
    """Draw the spans of some rows of a trace until a time: in the colour of their group, grey if several share."""
    for height, row in enumerate(rows.values()):
        for name, start_ms, duration_ms in run.rows[row]:
            if start_ms < end_ms and "repetitions" not in name:
                group = re.match(r"group (\d+)", name)
                colour = colours[int(group[1])] if group else SHARED
                axes.broken_barh(
                    [(start_ms, duration_ms)], (height - 0.35, 0.7), color=colour, lw=0
                )
    axes.set(xlim=(0, end_ms), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.grid(visible=True, axis="x")


def record(commands: Sequence[str], folder: Path) -> None:
    """Run commands in an empty folder, and write what they print as a picture of a terminal."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    environment = os.environ | {
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
    }
    for command in commands:
        console.print(Text(f"$ {command}", style="bold"))
        ran = subprocess.run(
            [SOCFLOWER, *command.split()[1:]],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        console.print(Text.from_ansi(ran.stdout.rstrip()), end="\n\n")
    svg = console.export_svg(title="socflower", theme=MONOKAI)
    # Fonts are the reader's: a page from disk loads nothing.
    (FIGURES / "terminal.svg").write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
