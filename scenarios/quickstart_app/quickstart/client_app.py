"""The client: a model function, a data function and a trainer make a ClientApp."""

from flwr.app import Context

from quickstart.task import load_model, load_partition
from socflower import FP32Trainer, make_client_app, sgd


def trainer(context: Context) -> FP32Trainer:
    """Train with SGD at the run config's learning rate."""
    return FP32Trainer(optimizer=sgd(float(context.run_config["learning-rate"])))


app = make_client_app(
    load_model, lambda context, part, num_parts: load_partition(part, num_parts), trainer
)
