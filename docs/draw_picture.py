"""Draw the README's picture, accuracy over virtual time, from the results of `make demo`; `make picture` runs it."""

import json
import re
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from socflower.quantities import human_seconds

DOCS = Path(__file__).parent
NAMES = {
    "socflow": "SoCFlow, 32 SoCs in 8 groups",
    "sgd": "one SoC",
    "ring": "one ring of 16 SoCs",
    "local-sgd": "local SGD, 32 SoCs",
    "fedavg": "FedAvg, 32 SoCs",
}
COLOURS = {
    "light": ("#0072B2", "#CC79A7", "#D55E00", "#7A5195", "#009E73"),
    "dark": ("#56B4E9", "#E6A1C9", "#FF9D6B", "#C9A2E8", "#62D6AB"),
}
INK = {"light": "#1b1f24", "dark": "#e8eaed"}
GRID = {"light": "#d5dae0", "dark": "#3b4249"}
TICKS_S = (1, 3, 10, 30, 60, 180, 600, 1800, 3600)


STYLE: dict[str, object] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "socflower",
    "font.family": "sans-serif",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def main() -> None:
    """Write picture-light.svg and picture-dark.svg beside this file."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo")
    comparison = json.loads((folder / "comparison.json").read_text("utf-8"))
    curves = {}
    for row in comparison["rows"]:
        result = json.loads((folder / row["strategy"] / "result.json").read_text("utf-8"))
        curves[row["strategy"]] = result["rounds"]
    for theme in COLOURS:
        picture(curves, comparison["target_accuracy"], theme, DOCS / f"picture-{theme}.svg")


def _whole_seconds(seconds: float, _: object) -> str:
    return re.sub(r"\.0+ | 00 s", " ", human_seconds(seconds)).strip()


def picture(
    curves: dict[str, list[dict[str, float]]], target: float, theme: str, path: Path
) -> None:
    """Draw the curves of all strategies with a transparent background."""
    of_ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = STYLE | dict.fromkeys(of_ink, INK[theme]) | {"grid.color": GRID[theme]}
    with rc_context(style):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for (name, rounds), colour in zip(curves.items(), COLOURS[theme], strict=False):
            shown = [entry for entry in rounds if entry["virtual_s"] > 0]
            axes.plot(
                [entry["virtual_s"] for entry in shown],
                [entry["accuracy"] for entry in shown],
                color=colour,
                linewidth=2.5,
                marker="o",
                markersize=4,
                label=NAMES.get(name, name),
            )
        axes.axhline(target, color=INK[theme], linewidth=1, dashes=(4, 3))
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        ticks_s = [tick for tick in TICKS_S if low <= tick <= high]
        axes.xaxis.set_major_locator(FixedLocator(ticks_s))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_whole_seconds))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("time on the cluster, logarithmic")
        axes.set_ylabel("accuracy")
        # Lower accuracies last only for seconds.
        axes.set_ylim(0.7, 1.0)
        axes.grid(visible=True)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
