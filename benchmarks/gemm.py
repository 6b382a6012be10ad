"""Products of int8 matrices with exact int32 sums, against torch's FP32 product and its own `_int_mm`.

out[m, n] = sum over k of lhs[m, k] * rhs[n, k]; both sides read the same row-major matrices, and packing is part of
every call. Shapes are those of training steps of batch 64, a square one, and one next to powers of two.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Row, measure_interleaved, more_is_better, peer_notes
from benchmarks.int8_settings import describe_peers, one_thread, rows_of, settings
from socflower import _int8

# Rows, columns, depth.
Shape = tuple[int, int, int]

SHAPES: dict[str, Shape] = {
    "square": (1024, 1024, 1024),
    "VGG-11, 64 to 128 channels at 16 x 16": (16384, 128, 576),
    "VGG-11, 512 to 512 channels at 4 x 4": (1024, 512, 4608),
    "VGG-11, classifier": (64, 10, 512),
    "LeNet-5, first linear layer": (64, 120, 400),
    "beside powers of two": (257, 127, 1025),
}
QUICK = ("VGG-11, classifier", "LeNet-5, first linear layer", "beside powers of two")


def run(quick: bool = False) -> list[Row]:
    """Return the rates of all shapes in each setting; sums must equal those of float64, which are exact."""
    peer_notes.update(describe_peers())
    return [
        row
        for setting in settings()
        for row in rows_of(setting, "benchmarks.gemm:rows", quick=quick)
    ]


def rows(kernel: str, quick: bool) -> list[Row]:
    """Return this process's rows. `limit` is the best rate of any of its shapes with the same range of values."""
    import torch

    one_thread(torch)
    engine = _int8.Engine(kernel=kernel)
    names = QUICK if quick else tuple(SHAPES)
    measured = [row for name in names for row in _compare(torch, engine, name, 3 if quick else 15)]
    best = {
        kind: max(row["ours"] for row in measured if row["kind"] == kind)
        for kind in ("0..127", "-127..127")
    }
    return [
        more_is_better(
            f"{kernel}: {row['name']}, lhs in {row['kind']}",
            row["ours"],
            row["peer"],
            row["peer_value"],
            "GOP/s",
            limit=best[row["kind"]],
            ok=row["ok"],
        )
        for row in measured
    ]


def _compare(torch: Any, engine: _int8.Engine, name: str, repeats: int) -> list[dict[str, Any]]:
    num_rows, num_columns, depth = SHAPES[name]
    rng = np.random.default_rng(0)
    rhs = rng.integers(-127, 128, (num_columns, depth), dtype=np.int8)
    found = []
    for kind, low in (("0..127", 0), ("-127..127", -127)):
        lhs = rng.integers(low, 128, (num_rows, depth), dtype=np.int8)
        exact = (lhs.astype(np.float64) @ rhs.T.astype(np.float64)).astype(np.int64)
        out = np.empty((num_rows, num_columns), dtype=np.int32)
        ours = _ours(engine, lhs, rhs, out, activations=low == 0)
        num_operations = 2e-9 * num_rows * num_columns * depth
        for peer, theirs, tolerance in _peers(torch, lhs, rhs, exact):
            our_time, their_time = measure_interleaved([ours, theirs], repeats=repeats)
            wrong = float(np.mean(np.abs(theirs().numpy() - exact) > tolerance))
            found.append({
                "name": f"{name} ({num_rows} x {num_columns} x {depth})",
                "kind": kind,
                "ours": num_operations / our_time.median_s,
                "peer": peer if wrong == 0.0 else f"{peer}, of whose sums {wrong:.0%} are wrong",
                "peer_value": num_operations / their_time.median_s,
                "ok": bool(np.array_equal(out, exact)),
            })  # fmt: skip
    return found


def _ours(
    engine: _int8.Engine,
    lhs: npt.NDArray[np.int8],
    rhs: npt.NDArray[np.int8],
    out: npt.NDArray[np.int32],
    *,
    activations: bool,
) -> Callable[[], None]:
    (num_rows, depth), num_columns = lhs.shape, len(rhs)
    return lambda: _int8.gemm(engine, lhs, rhs, out, num_rows, num_columns, depth, activations)


def _peers(
    torch: Any, lhs: npt.NDArray[np.int8], rhs: npt.NDArray[np.int8], exact: npt.NDArray[np.int64]
) -> list[tuple[str, Callable[[], Any], float]]:
    """Return the name of each peer, its product, and how far a sum may be from the exact one.

    Without VNNI, oneDNN multiplies bytes by `vpmaddubsw`, whose sums of two saturate at int16; the row says how many
    sums are wrong for that reason.
    """
    lhs8, rhs8 = torch.from_numpy(lhs), torch.from_numpy(rhs)
    lhs32, rhs32 = lhs8.float(), rhs8.float()
    out = torch.empty(exact.shape)
    rounding_error = 1e-5 * float(np.abs(exact).max())
    return [
        ("torch FP32", lambda: torch.mm(lhs32, rhs32.t(), out=out), rounding_error),
        ("torch._int_mm", lambda: torch._int_mm(lhs8, rhs8.t()), 0.0),
    ]
