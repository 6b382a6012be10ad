"""Draw the README's picture, the front of time against energy, from stored results; `make picture` runs it."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from socflower.quantities import percent
from socflower.report.front import draw_front
from socflower.report.quality import ACCURACY
from socflower.scenario.predicted_methods import front_of

DOCS = Path(__file__).parent
RESULTS = DOCS / "results" / "digits_seeds.json"
LABELS: dict[str, tuple[str, tuple[int, int], str]] = {
    "socflow": ("SoCFlow, 32 SoCs in 8 groups", (68, 6), "left"),
    "sgd": ("one SoC", (8, -18), "left"),
    "ring": ("one ring of 16 SoCs", (56, 8), "left"),
    "local-sgd": ("local SGD, 32 SoCs", (0, 14), "center"),
    "fedavg": ("FedAvg, 32 SoCs", (-12, 8), "right"),
}
"""Each strategy's name, and where it stands: points from its mean, and which side of the text is there."""
COLOURS = {
    "light": ("#0072B2", "#CC79A7", "#D55E00", "#009E73", "#7A5195"),
    "dark": ("#56B4E9", "#E6A1C9", "#FF9D6B", "#62D6AB", "#C9A2E8"),
}
INK = {"light": "#1b1f24", "dark": "#e8eaed"}
GRID = {"light": "#d5dae0", "dark": "#3b4249"}
STYLE: dict[str, object] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "socflower",
    "font.family": "sans-serif",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def main() -> None:
    """Write picture-light.svg and picture-dark.svg beside this file, or into the folder that is given."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    found = json.loads(RESULTS.read_text("utf-8"))
    rows = front_of(found["rows"], ACCURACY)
    for theme in COLOURS:
        picture(rows, found["target_accuracy"], theme, folder / f"picture-{theme}.svg")


def picture(rows: Sequence[Mapping[str, Any]], target: float, theme: str, path: Path) -> None:
    """Draw the front with a transparent background, each strategy's name beside its point."""
    of_ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = STYLE | dict.fromkeys(of_ink, INK[theme]) | {"grid.color": GRID[theme]}
    with rc_context(style):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        axes = figure.add_subplot()
        draw_front(axes, rows, colours=COLOURS[theme], line=INK[theme])
        for row in rows:
            name, offset, side = LABELS[row["strategy"]]
            axes.annotate(
                name if row["on_front"] else f"{name}: dominated",
                (row["time_s"], row["energy_j"]),
                xytext=offset,
                textcoords="offset points",
                ha=side,
            )
        axes.set_xlabel(f"time on the cluster to {percent(target, 0)}, logarithmic")
        axes.set_ylabel(f"energy to {percent(target, 0)}, logarithmic")
        axes.margins(x=0.06, y=0.06)
        axes.grid(visible=True)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
