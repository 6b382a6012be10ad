"""The client: a member of a ring that records its steps in a ledger."""

from pathlib import Path

from flwr.app import Context
from task import load_model, load_samples, num_samples

from socflower.clients.app import make_client_app
from socflower.training.fp32 import FP32Trainer, sgd
from socflower.workloads.dataset import LabelledData


def load_all(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
    """Return all data, which the strategy divides among the groups."""
    return load_samples(num_samples(dict(context.run_config)))


def ledger(context: Context) -> Path:
    """Return this node's file of steps."""
    return (
        Path(str(context.run_config["ledgers"]))
        / f"node-{context.node_config['partition-id']}.jsonl"
    )


app = make_client_app(
    lambda context: load_model(),
    load_all,
    FP32Trainer(optimizer=sgd(0.002), channels_last=True),
    ring_ledger=ledger,
)
