"""The client of both strategies: training on a node's share of the digits."""

from flwr.app import Context
from task import load_model

from socflower.clients.app import make_client_app
from socflower.workloads import LabelledData, iid_partition, load_data


def load_partition(context: Context, partition_id: int, num_partitions: int) -> LabelledData:
    """Return a share of the training digits."""
    data = load_data("digits").train
    return data.select(iid_partition(len(data), num_partitions, seed=1)[partition_id])


app = make_client_app(lambda context: load_model(str(context.run_config["model"])), load_partition)
