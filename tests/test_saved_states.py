"""Every kind of saved state refuses damaged, old and foreign files in one line, and loses nothing."""

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from socflower.clients.saved_training import StateFiles, TrainerState
from socflower.clients.split.saved_halves import SplitState
from socflower.edgecloud.cloud.session_store import SessionStore
from socflower.edgecloud.runtime.checkpoints import CheckpointStore, SavedHalf, SplitCheckpoint
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.frames import PROTOCOL_VERSION, Limits, SplitRefused
from socflower.engines.checkpoint import Checkpoint, CheckpointFolder
from socflower.errors import ConfigError, SocflowerError
from socflower.flower_adapter import begin_run
from socflower.wire import saved_state
from socflower.wire.folders import FolderLock
from socflower.wire.message_keys import CONFIG, RESUMED, GroupTask
from socflower.wire.saved_state import StateKind, seal
from socflower.wire.split_message_keys import SplitTask
from tests.edgecloud.runtime.numpy_halves import Back
from tests.one_line import one_line, refused

Say = Callable[[str], None]


@dataclass(frozen=True)
class Store:
    """How a part writes its entries 1 and 2, and which one it goes on from."""

    write: Callable[[Path, int], None]
    # `None`: from none, and the caller says so.
    read: Callable[[Path, Say], int | None]
    # Of entry 2.
    file: str
    # What becomes of the training where entry 2 is damaged.
    without_it: int | type[SocflowerError] | None
    # Held while it writes.
    lock: str | None


# ---------------------------------------------------------------------------------------------- the stores
def write_run(folder: Path, number: int) -> None:
    kept = CheckpointFolder(folder)
    kept.create()
    kept.write(
        Checkpoint(
            server_round=number,
            num_rounds=9,
            scenario={},
            engine="local",
            versions={},
            rounds=[],
            clock={},
            arrays={"w": np.full(3, number)},
            trace_parts=list(range(1, number + 1)),
        ),
        {"spans": [number]},
    )


def read_run(folder: Path, say: Say) -> int | None:
    found = CheckpointFolder(folder).newest(say)
    return None if found is None else int(found.arrays["w"][0])


def context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def trainer(folder: Path, first_step: int) -> TrainerState:
    task = GroupTask(
        group_id=0,
        num_groups=1,
        members=(0,),
        leader=0,
        partitions=(0,),
        num_partitions=1,
        capacities=(1.0,),
        first_step=first_step,
        num_steps=1,
        steps_per_epoch=1,
        total_steps=9,
        batch_size=1,
        reshuffle=False,
        deal_epoch=0,
        seed=1,
        num_samples=9,
    )
    begin_run(1)
    message = Message(RecordDict({CONFIG: ConfigRecord({RESUMED: True})}), 5, "train")
    return TrainerState(task, message, context(), StateFiles(folder))


def read_trainer(folder: Path, say: Say) -> int | None:
    state = trainer(folder, 2).read()
    return None if state is None else int(state)


def halves(folder: Path, first_batch: int) -> SplitState:
    task = SplitTask(
        parties=(0,),
        num_parties=1,
        mode="own",
        reverse=False,
        first_batch=first_batch,
        num_batches=1,
        total_batches=9,
        batches_per_epoch=3,
        seed=1,
        cuts=(1,),
        bits=(8,),
        windows=(0,),
        gradient_bits=8,
    )
    return SplitState(task, context(), StateFiles(folder))


def read_halves(folder: Path, say: Say) -> int | None:
    found = halves(folder, 2).read()
    return None if found is None else int(found[0])


def write_half(folder: Path, number: int) -> None:
    CheckpointStore(folder, "mine").save(
        SplitCheckpoint(batch=number, epoch_id="ab"), SavedHalf(half=b"%d" % number, codec=b"c")
    )


def read_half(folder: Path, say: Say) -> int | None:
    handler = logging.Handler()
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("socflower.edgecloud.runtime.checkpoints")
    log.addHandler(handler)
    try:
        store = CheckpointStore(folder, "mine")
        return int(store.load(store.checkpoints()[-1]).half)
    finally:
        log.removeHandler(handler)


@contextmanager
def sessions(folder: Path, say: Say) -> Iterator[SessionStore]:
    store = SessionStore(
        lambda terms, weights: cast(Any, Back()),
        folder=folder,
        limits=Limits(),
        patience_s=1.0,
        gather_s=1.0,
        most_parties=1,
        log=say,
    )
    try:
        yield store
    finally:
        store.close()


def write_session(folder: Path, number: int) -> None:
    with sessions(folder, print) as store:
        store.open(
            wire.Opening(
                version=PROTOCOL_VERSION, run_id=f"run-{number}", num_bytes=0, num_parties=1
            ),
            memoryview(b""),
            ("token",),
        )


def read_session(folder: Path, say: Say) -> int | None:
    with sessions(folder, say) as store:
        return max((int(session.terms.run_id[-1]) for session in store.all()), default=None)


STORES = {
    "checkpoint": Store(write_run, read_run, "round-000002.ckpt", 1, ".round-lock"),
    "spans": Store(write_run, read_run, "trace-000002.spans", 1, ".trace-lock"),
    "trainer state": Store(
        lambda folder, number: trainer(folder, number - 1).save(b"%d" % number, 1.0),
        read_trainer,
        "group-0-of-1-steps-9-at-000002.state",
        ConfigError,
        ".group-0-of-1-steps-9-at-lock",
    ),
    "halves": Store(
        lambda folder, number: halves(folder, number - 1).save([b"%d" % number], [1]),
        read_halves,
        "group-0-of-1-steps-9-at-000002.state",
        None,
        ".group-0-of-1-steps-9-at-lock",
    ),
    "half of a split": Store(
        write_half, read_half, "checkpoint-000001.saved", 1, ".checkpoint-lock"
    ),
    "session": Store(write_session, read_session, "run-2/session.sealed", 1, None),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Store:
    return STORES[request.param]


@pytest.fixture
def folder(store: Store, tmp_path: Path) -> Path:
    for number in (1, 2):
        store.write(tmp_path, number)
    assert store.read(tmp_path, pytest.fail) == 2
    return tmp_path


def check_damaged(store: Store, folder: Path) -> None:
    """What is left is used, and one line says of the damage and where it is."""
    said: list[str] = []
    if isinstance(store.without_it, type):
        said.append(refused(lambda: store.read(folder, said.append), error=store.without_it))
    else:
        assert store.read(folder, said.append) == store.without_it
    for line in said:
        one_line(line, Path(store.file).name, ";")
    assert said or store.without_it is None


# ---------------------------------------------------------------------------------------------- damaged and foreign
def interesting(content: bytes) -> list[int]:
    """Return offsets in each part of a file, around the borders of its lines and its ends."""
    lines = [index for index, byte in enumerate(content) if byte == ord("\n")][:2]
    beside = {index + step for index in lines for step in (-1, 0, 1, 5)}
    near = {0, 9, 17, 40, 82, len(content) - 1} | beside
    return sorted(index for index in near if 0 <= index < len(content))


def test_a_file_cut_anywhere_is_damage(store: Store, folder: Path) -> None:
    path = folder / store.file
    whole = path.read_bytes()
    for length in interesting(whole):
        path.write_bytes(whole[:length])
        check_damaged(store, folder)


def test_a_byte_flipped_anywhere_is_damage(store: Store, folder: Path) -> None:
    path = folder / store.file
    whole = path.read_bytes()
    for index in interesting(whole):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x20]) + whole[index + 1 :])
        check_damaged(store, folder)


@pytest.mark.parametrize(
    "content",
    [b"\x89PNG\r\n\x1a\n", b'{"schema": 1}', b"PK\x03\x04", b"socflower", b"\n\n", b"\xff"],
)
def test_a_file_of_another_program_is_damage(store: Store, folder: Path, content: bytes) -> None:
    (folder / store.file).write_bytes(content)
    check_damaged(store, folder)


def test_a_folder_in_the_place_of_a_file_is_damage_and_stays(store: Store, folder: Path) -> None:
    path = folder / store.file
    path.unlink()
    path.mkdir()
    check_damaged(store, folder)
    assert path.is_dir()


@pytest.mark.skipif(
    os.getuid() == 0, reason="root may read everything; a folder in the place of a file fails alike"
)
def test_a_file_that_may_not_be_read_is_damage(store: Store, folder: Path) -> None:
    (folder / store.file).chmod(0)
    check_damaged(store, folder)


# ---------------------------------------------------------------------------------------------- old, new, another kind
def written_by(path: Path, **changes: Any) -> bytes:
    """Return the file as another version of socflower, or another part of it, would have written it."""
    _, _, rest = path.read_bytes().partition(b"\n")
    line, _, payload = rest.partition(b"\n")
    header = json.loads(line)
    form = StateKind(
        name=changes.get("kind", header["kind"]),
        schema=header["schema"] + changes.get("newer", 0),
        remedy="",
    )
    return b"".join(
        seal(form, header["state"], [payload], owner=header["owner"], number=header["number"])
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"newer": -1}, "older version"),
        ({"newer": 1}, "newer version"),
        ({"kind": "recipe"}, "recipe"),
    ],
)
def test_a_whole_file_of_another_version_or_kind_is_refused(
    store: Store,
    folder: Path,
    changes: dict[str, Any],
    says: str,
) -> None:
    """The training does not go on from an earlier entry in silence: its user has to decide."""
    path, said = folder / store.file, list[str]()
    path.write_bytes(written_by(path, **changes))
    if store is STORES["session"]:
        # The cloud serves its other runs.
        assert store.read(folder, said.append) == 1
    else:
        said.append(refused(lambda: store.read(folder, pytest.fail), error=SocflowerError))
    (line,) = said
    one_line(line, path.name, ";", says)


# ---------------------------------------------------------------------------------------------- writers in trouble
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_is_one_line_and_loses_nothing(
    store: Store,
    tmp_path: Path,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.write(tmp_path, 1)
    before = files_of(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    full = (ConfigError, SplitRefused)
    refused(lambda: store.write(tmp_path, 2), "No space left on device", error=full)
    monkeypatch.undo()
    assert files_of(tmp_path) == before
    store.write(tmp_path, 2)
    assert store.read(tmp_path, pytest.fail) == 2


def test_a_writer_killed_between_write_and_replace_leaves_the_entry_before(
    store: Store, tmp_path: Path
) -> None:
    store.write(tmp_path, 1)
    before = files_of(tmp_path)
    writer = multiprocessing.get_context("fork").Process(
        target=write_and_die, args=(store, tmp_path)
    )
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert list(tmp_path.rglob(".*.part")), "it was killed too early"
    after = files_of(tmp_path)
    assert {name: after[name] for name in before} == before and store.file not in after
    store.write(tmp_path, 2)
    assert not list(tmp_path.rglob(".*.part")) and store.read(tmp_path, pytest.fail) == 2


def write_and_die(store: Store, folder: Path) -> None:
    replace_file = os.replace

    def kill(source: Path, target: Path) -> None:
        if Path(target).name == Path(store.file).name:
            os.kill(os.getpid(), signal.SIGKILL)
        replace_file(source, target)

    os.replace = kill  # type: ignore[assignment]
    store.write(folder, 2)


def test_two_that_write_at_once_are_told_of_each_other(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved_state, "_WRITE_WAIT_S", 0.0)
    store.write(tmp_path, 1)
    with FolderLock(tmp_path / (store.lock or ".socflower.lock"), "the first"):
        refused(lambda: store.write(tmp_path, 2), os.getpid())
    store.write(tmp_path, 2)
    assert store.read(tmp_path, pytest.fail) == 2
    assert not list(tmp_path.rglob(".*lock"))


def files_of(folder: Path) -> dict[str, bytes]:
    """Return what a resumption could read; half-written files and spans of a round to come are not that."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith((".part", "lock", "2.spans"))
    }
