"""Numbers that a client's reply tells of its training."""

import math

from flwr.app import Message

from socflower.cluster.protocol import NUM_EXAMPLES


def metric(reply: Message, key: str) -> float | None:
    """Return a number of the first metric record that has it; None if none has."""
    for record in reply.content.metric_records.values():
        value = record.get(key)
        if isinstance(value, int | float):
            return value
    return None


def fault_of_num_examples(reply: Message) -> str | None:
    """Return what is wrong with how many examples the client says it had; to say nothing is no fault."""
    value = metric(reply, NUM_EXAMPLES)
    if value is None or (math.isfinite(value) and value >= 0):
        return None
    return f"its {NUM_EXAMPLES} is {value:g}, which is no number of examples"
