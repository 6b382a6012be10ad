"""The client: the model, the data and a trainer make a ClientApp."""

from flwr.app import Context

from pytorch_groups.task import load_model, load_partition
from socflower import FP32Trainer, make_client_app, sgd


def trainer(context: Context) -> FP32Trainer:
    return FP32Trainer(optimizer=sgd(float(context.run_config["learning-rate"]), momentum=0.9))


app = make_client_app(load_model, load_partition, trainer)
