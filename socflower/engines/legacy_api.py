"""What messages say of apps of Flower's API before messages: `ServerAppComponents`, workflows and `NumPyClient`.

Flower converts their instructions and results to messages, whose records have the names below.
"""

from typing import Any

from flwr.app import Message

from socflower.flower_adapter import Code

_INSTRUCTIONS = ("fitins.config", "evaluateins.config", "secaggplus_configs")
_RESULTS = ("fitres", "evaluateres")
_NUM_EXAMPLES = "num_examples"


def round_of(message: Message) -> int | None:
    """Return the round of such a message, which is its group; None for other messages."""
    group = message.metadata.group_id
    is_ours = any(name in message.content.config_records for name in _INSTRUCTIONS)
    return int(group) if is_ours and group.isdecimal() else None


def metrics_of(reply: Message) -> dict[str, Any] | None:
    """Return loss and metrics of a client's result; None for other replies."""
    kind = _kind(reply)
    if kind is None:
        return None
    return {
        **reply.content.metric_records.get(f"{kind}.loss", {}),
        **reply.content.config_records.get(f"{kind}.metrics", {}),
    }


def num_examples_of(reply: Message) -> float | None:
    """Return the number of examples of a client's result; None for other replies."""
    kind = _kind(reply)
    value = (
        None
        if kind is None
        else reply.content.metric_records[f"{kind}.{_NUM_EXAMPLES}"].get(_NUM_EXAMPLES)
    )
    return value if isinstance(value, int | float) else None


def fault_of(reply: Message) -> str | None:
    """Return the fault that a client's result reports, such as that the client has no `fit`; None without."""
    for kind in (*_RESULTS, "getparametersres"):
        status = reply.content.config_records.get(f"{kind}.status")
        if status is not None and status["code"] != Code.OK.value:
            return str(status["message"] or Code(status["code"]).name)
    return None


def _kind(reply: Message) -> str | None:
    return next(
        (kind for kind in _RESULTS if f"{kind}.{_NUM_EXAMPLES}" in reply.content.metric_records),
        None,
    )
