"""The parts of Flower that the local engine needs and Flower 1.41 does not export publicly."""

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SUPERLINK_NODE_ID = 1
"""The source node of a ServerApp's messages."""

LOAD_CLIENT_APP_EXCEPTION = 1
CLIENT_APP_RAISED_EXCEPTION = 2
CLIENT_APP_CRASHED = 8
"""Error codes of replies, as Flower's own runtimes set them."""


def begin_run(run_id: int) -> Run:
    """Make this process the ServerApp of run `run_id`, so that it can build messages; return the run."""
    TaskIdentity.run_id = run_id
    TaskIdentity.task_id = 0
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    return Run.create_empty(run_id)


def record_dict_to_bytes(records: RecordDict) -> bytes:
    """Return records as the bytes in which Flower sends them."""
    return recorddict_to_proto(records).SerializeToString(deterministic=True)


def record_dict_from_bytes(content: bytes) -> RecordDict:
    """Return the records of `record_dict_to_bytes`."""
    return recorddict_from_proto(RecordDictProto.FromString(content))


__all__ = [
    "CLIENT_APP_CRASHED",
    "CLIENT_APP_RAISED_EXCEPTION",
    "LOAD_CLIENT_APP_EXCEPTION",
    "SUPERLINK_NODE_ID",
    "Run",
    "begin_run",
    "record_dict_from_bytes",
    "record_dict_to_bytes",
]
