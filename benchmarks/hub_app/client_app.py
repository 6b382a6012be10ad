"""The client of both strategies: training on a node's share of the data."""

from flwr.app import Context
from task import load_model, load_trainer, load_training_data

from socflower.clients.app import make_client_app
from socflower.workloads.data_source import DataSource
from socflower.workloads.partition import iid_partition


def load_partition(context: Context, partition_id: int, num_partitions: int) -> DataSource:
    """Return a share of the training data."""
    data = load_training_data(str(context.run_config["model"]))
    return data.select(iid_partition(len(data), num_partitions, seed=1)[partition_id])


app = make_client_app(
    lambda context: load_model(str(context.run_config["model"])),
    load_partition,
    lambda context: load_trainer(str(context.run_config["model"])),
)
