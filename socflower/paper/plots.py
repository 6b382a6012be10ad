"""Our values over the paper's as a picture: a dot for each number that both have, on a logarithmic axis."""

import io
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from socflower.paper.comparison import OTHER_READING, SCORED, WITHIN, Row
from socflower.report.plots import line_style, report_style

_ROW_INCHES, _WIDTH_INCHES = 0.22, 7.5
_TICKS = (0.1, 0.2, 0.5, 1.0 / WITHIN, 1.0, WITHIN, 2.0, 5.0, 10.0)
_FEW_TICKS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
# The ratio of an axis's ends from which it has few ticks.
_WIDE = 30.0


def ratio_plot(title: str, rows: Sequence[Row]) -> bytes:
    """Return the SVG of ours over the paper's by cell, with a mark for scored cells, other readings and the rest each.

    Between the thin lines a number counts as reproduced.
    """
    drawn = [row for row in rows if row.ratio is not None]
    with report_style():
        drawing = Figure(
            figsize=(_WIDTH_INCHES, 0.9 + _ROW_INCHES * len(drawn)), layout="constrained"
        )
        axes = drawing.subplots()
        for at, use in enumerate((SCORED, OTHER_READING, None)):
            places = [
                (row.ratio, place)
                for place, row in enumerate(drawn)
                if row.cell.use == use
                or (use is None and row.cell.use not in (SCORED, OTHER_READING))
            ]
            if places:
                style = line_style(at) | {"linewidth": 0}
                axes.plot(*zip(*places, strict=True), **style, label=use or "not scored")
        for factor, width in ((1.0, 1.2), (WITHIN, 0.5), (1.0 / WITHIN, 0.5)):
            axes.axvline(factor, color="0.5", linewidth=width, zorder=0)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        ticks = _FEW_TICKS if high / low > _WIDE else _TICKS
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(drawn)), [row.cell.key for row in drawn])
        axes.invert_yaxis()
        axes.set_xlabel(f"{title}: ours / paper")
        axes.legend(loc="best")
        stream = io.BytesIO()
        drawing.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()
