"""Checkpoint files: exact, noticed when damaged, the one before at hand, and refused for another run."""

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from socflower.engines.checkpoint import Checkpoint, CheckpointFolder, difference, require_same_run
from socflower.wire.saved_state import DamagedFile
from tests.one_line import refused

ARRAYS = st.dictionaries(
    st.text(min_size=1),
    arrays_of.arrays(
        st.sampled_from(["<f4", "<f8", "<i8", "|u1", "|b1"]),
        arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    max_size=4,
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def checkpoint(server_round: int = 1, **changes: Any) -> Checkpoint:
    values: dict[str, Any] = {
        "server_round": server_round,
        "num_rounds": 9,
        "scenario": {"seed": 1, "train": {"epochs": 2}},
        "engine": "local",
        "versions": {"torch": "2"},
        "rounds": [{"round": 0, "loss": None}],
        "clock": {"duration_s": 0.1},
        "arrays": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
    }
    return Checkpoint(**{**values, **changes})


def equal(left: Checkpoint, right: Checkpoint) -> bool:
    same_arrays = list(left.arrays) == list(right.arrays) and all(
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        for one, other in zip(left.arrays.values(), right.arrays.values(), strict=True)
    )
    return (
        same_arrays
        and plain(left.strategy) == plain(right.strategy)
        and replace(left, arrays={}, strategy={}) == replace(right, arrays={}, strategy={})
    )


def plain(state: Any) -> Any:
    """Return a state with its arrays as values that compare."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.dtype.str, state.shape, state.tobytes()
    return state


@given(
    arrays=ARRAYS,
    outer=ARRAYS,
    virtual_s=FLOATS,
    loss=st.none() | FLOATS,
    dropped=st.lists(st.integers(0, 99)),
)
def test_a_checkpoint_comes_back_as_it_was(
    arrays: dict[str, Any],
    outer: dict[str, Any],
    virtual_s: float,
    loss: float | None,
    dropped: list[int],
) -> None:
    written = checkpoint(
        3,
        arrays=arrays,
        strategy={"outer": outer, "balance": {"deep": {"moments": outer}}, "dropped": dropped},
        clock={"duration_s": virtual_s},
        rounds=[{"loss": loss}],
        warm_up={"num_groups": 4},
        resumed_from=[1, 2],
    )
    with TemporaryDirectory() as folder:
        kept = CheckpointFolder(Path(folder))
        kept.create()
        kept.write(written)
        found = kept.newest()
        assert found is not None and equal(found, written)


def test_the_last_two_are_kept_and_the_spans_of_all_rounds(tmp_path: Path) -> None:
    kept = CheckpointFolder(tmp_path)
    kept.create()
    for server_round in range(1, 12):
        kept.write(
            checkpoint(server_round, trace_parts=list(range(1, server_round + 1))),
            {"spans": [server_round]},
        )
    assert kept.numbers() == [11, 10]
    found = kept.newest()
    assert found is not None and found.server_round == 11
    assert [part["spans"] for part in kept.trace_parts(found)] == [
        [number] for number in range(1, 12)
    ]
    kept.remove_after(10)
    assert kept.numbers() == [10] and not list(tmp_path.glob("trace-000011*"))
    kept.remove()
    assert not tmp_path.exists()


def test_somebody_elses_files_are_never_removed(tmp_path: Path) -> None:
    kept = CheckpointFolder(tmp_path)
    kept.create()
    kept.write(checkpoint(), {"spans": []})
    (tmp_path / "mine.ckpt").write_text("mine")
    kept.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.ckpt"]


@settings(max_examples=20)
@given(
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    part=st.sampled_from(["round", "trace"]),
)
def test_damage_anywhere_is_noticed_and_the_one_before_is_used(
    where: float, bit: int, part: str
) -> None:
    with TemporaryDirectory() as folder:
        kept = CheckpointFolder(Path(folder))
        kept.create()
        for number in (1, 2):
            kept.write(
                checkpoint(number, trace_parts=list(range(1, number + 1))),
                {"spans": [[number] * 20]},
            )
        (path,) = Path(folder).glob(f"{part}-000002.*")
        content = bytearray(path.read_bytes())
        content[int(where * len(content))] ^= 1 << bit
        path.write_bytes(content)
        said: list[str] = []
        found = kept.newest(said.append)
        assert found is not None and equal(found, checkpoint(1, trace_parts=[1]))
        (line,) = said
        assert path.name in line and "continuing from the one before it, round-000001.ckpt" in line


def test_if_all_are_damaged_the_run_does_not_start_anew_in_silence(tmp_path: Path) -> None:
    kept = CheckpointFolder(tmp_path)
    kept.create()
    assert kept.newest() is None
    for number in (1, 2):
        kept.write(checkpoint(number))
        os.truncate(tmp_path / f"round-00000{number}.ckpt", 100)
    refused(lambda: kept.newest(), "round-000002.ckpt", "round-000001.ckpt")


@pytest.mark.parametrize("torn", ["trace-000002", "round-000002"])
def test_a_kill_between_write_and_rename_leaves_the_one_before(
    torn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = CheckpointFolder(tmp_path)
    kept.create()
    kept.write(checkpoint(1, trace_parts=[1]), {"spans": []})
    replace_file = os.replace

    class Killed(BaseException):
        pass

    def kill(source: Path, target: Path) -> None:
        if Path(target).stem == torn:
            # A process that is gone removes nothing.
            monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
            raise Killed
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(Killed):
        kept.write(checkpoint(2, trace_parts=[1, 2]), {"spans": [1]})
    monkeypatch.undo()
    assert list(tmp_path.glob(".*.part"))
    found = kept.newest()
    assert found is not None and found.server_round == 1
    kept.create()
    assert not list(tmp_path.glob(".*.part"))
    kept.write(checkpoint(2, trace_parts=[1, 2]), {"spans": [1]})
    assert kept.numbers() == [2, 1]


def test_spans_that_are_missing_make_a_checkpoint_unusable(tmp_path: Path) -> None:
    kept = CheckpointFolder(tmp_path)
    kept.create()
    kept.write(checkpoint(1, trace_parts=[1]), {"spans": []})
    (tmp_path / "trace-000001.spans").unlink()
    refused(lambda: kept.read(1), "trace-000001.spans", error=DamagedFile)


# ---------------------------------------------------------------------------------------------- the same run
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 2}, "seed was 1 there and is 2 now"),
        ({"train": {"epochs": 3}}, "train.epochs was 2 there and is 3 now"),
        ({"event": [{"round": 1}]}, "event was None there and is"),
    ],
)
def test_another_scenario_is_refused_by_the_key_that_differs(
    changes: dict[str, Any], key: str
) -> None:
    ours = {"seed": 1, "train": {"epochs": 2}, **changes}
    refused(
        lambda: require_same_run(
            checkpoint(), ours, "local", {"torch": "2"}, Path("out/checkpoint")
        ),
        key,
        "--fresh",
    )


def test_another_engine_or_version_is_refused() -> None:
    ours = {"seed": 1, "train": {"epochs": 2}}
    refused(
        lambda: require_same_run(checkpoint(), ours, "simulation", {"torch": "2"}, Path("x")),
        "local",
        "simulation",
    )
    refused(
        lambda: require_same_run(checkpoint(), ours, "local", {"torch": "3"}, Path("x")),
        "versions.torch",
    )


def test_claims_and_names_may_differ() -> None:
    ours = {
        "seed": 1,
        "train": {"epochs": 2},
        "name": "x",
        "question": "?",
        "expect": {"min_accuracy": 1.0},
        "compare": {"target_accuracy": 0.5},
    }
    require_same_run(checkpoint(), ours, "local", {"torch": "2"}, Path("x"))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, ("a[1].b", 2, 3)),
        ({"a": (1, 2)}, {"a": [1, 2]}, None),
        ({"a": [1]}, {"a": [1, 2]}, ("a", [1], [1, 2])),
        ({"a": 1}, {}, ("a", 1, None)),
        ({}, {}, None),
    ],
)
def test_the_first_difference_is_found(left: Any, right: Any, expected: Any) -> None:
    assert difference(left, right) == expected
