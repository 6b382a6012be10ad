"""The records between server and nodes of different versions."""

import hashlib
from dataclasses import fields
from typing import Any

import pytest

from socflower import __version__
from socflower.wire.message_keys import (
    MESSAGE_VERSION,
    DeviceReport,
    GroupTask,
    HeatReport,
    NodeStatus,
    PipelineTask,
    RingOutcome,
    RingTask,
    RoundNotes,
    SentSamples,
    StreamTask,
    decode,
    encode,
)
from socflower.wire.split_message_keys import SplitReport, SplitTask
from tests.one_line import refused

RECORDS = (
    *(GroupTask, SentSamples, StreamTask, RingTask, PipelineTask, RingOutcome, DeviceReport),
    *(RoundNotes, HeatReport, SplitTask, SplitReport),
)
KEYS_OF_VERSION = {1: "3184b1d49adbd819"}
"""The digest of the keys of all records, by `MESSAGE_VERSION`."""


def test_other_keys_are_another_version() -> None:
    """If this fails, raise `MESSAGE_VERSION`, and enter the digest of the keys that it has now."""
    keys = [(kind.__name__, each.name, str(each.type)) for kind in RECORDS for each in fields(kind)]
    digest = hashlib.sha256(repr(keys).encode()).hexdigest()[:16]
    assert KEYS_OF_VERSION[MESSAGE_VERSION] == digest


@pytest.mark.parametrize(
    ("changed", "messages"),
    [
        ({}, MESSAGE_VERSION),
        ({"messages": None}, 0),
        ({"messages": 9, "invented": 1.5}, 9),
        ({"messages": None, "protocol": None, "resident": None}, 0),
    ],
)
def test_a_status_of_any_version_says_which(changed: dict[str, Any], messages: int) -> None:
    sent = {**encode(NodeStatus(board=1, slot=2, protocol=7)), **changed}
    status = NodeStatus.decode({key: value for key, value in sent.items() if value is not None})
    assert (status.board, status.slot, status.messages) == (1, 2, messages)
    assert status.protocol == (0 if "protocol" in changed else 7)


def test_a_record_of_other_keys_names_the_versions_of_here() -> None:
    task = StreamTask(names=("w",), is_whole=True, delay_steps=0, mixing=1.0)
    sent = {**encode(task), "invented": 1}
    refused(lambda: decode(StreamTask, sent, "stream"), "invented", MESSAGE_VERSION, __version__)
