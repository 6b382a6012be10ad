"""Messages without processes: a grid that only knows its nodes, and replies made by hand."""

from collections.abc import Iterable

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from socflower.flower_adapter import give_id

NODES = (40, 10, 30, 20)  # Flower's ids come in no order


class PulledReplies:
    """Replies for who pushes messages: those that `send_and_receive` has, at once, and for nothing else, ever."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self._pushed: dict[str, Message] = getattr(self, "_pushed", {})
        ids = []
        for message in messages:
            ids.append(give_id(message))
            self._pushed[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = [
            self._pushed.pop(message_id) for message_id in message_ids if message_id in self._pushed
        ]
        return list(self.send_and_receive(asked)) if asked else []


class FakeGrid(PulledReplies):
    """All that a strategy asks of a Grid when it makes messages."""

    in_one_process = True

    def __init__(self, nodes: tuple[int, ...] = NODES) -> None:
        self._nodes = nodes

    def get_node_ids(self) -> tuple[int, ...]:
        return self._nodes


def model(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(3, value, np.float32))})


def answer(message: Message, value: float, num_examples: object = 1, **metrics: float) -> Message:
    """Reply with a model full of `value`, as a client that did its group's work."""
    group = message.content.config_records.get("group")
    if group is not None:
        metrics = {"socflower-group": int(group["group-id"]), **metrics}
    content = RecordDict(
        {"arrays": model(value), "metrics": MetricRecord({"num-examples": num_examples, **metrics})}
    )
    return Message(content, reply_to=message)


def answer_error(message: Message, code: int, reason: str) -> Message:
    return Message(Error(code, reason), reply_to=message)


def reply_with(content: RecordDict) -> Message:
    """Return a reply of nothing but `content`."""
    return Message(content, reply_to=Message(RecordDict(), NODES[0], "train"))


def values(arrays: ArrayRecord | None) -> list[float]:
    assert arrays is not None
    return [float(value) for value in arrays["w"].numpy()]
