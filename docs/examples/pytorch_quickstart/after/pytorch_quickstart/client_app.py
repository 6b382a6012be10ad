"""The client: train and evaluate, each with a loop of its own."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pytorch_quickstart.task import Net, load_data
from pytorch_quickstart.task import test as test_fn
from pytorch_quickstart.task import train as train_fn
from socflower import FP32Trainer, make_client_app, sgd

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    partition_id, num_partitions = (
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
    )
    loader, _ = load_data(partition_id, num_partitions, context.run_config["batch-size"])
    loss = train_fn(
        model, loader, context.run_config["local-epochs"], message.content["config"]["lr"], device
    )
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(loader.dataset)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    partition_id, num_partitions = (
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
    )
    _, loader = load_data(partition_id, num_partitions, context.run_config["batch-size"])
    loss, accuracy = test_fn(model, loader, device)
    metrics = MetricRecord(
        {"eval-loss": loss, "eval-accuracy": accuracy, "num-examples": len(loader.dataset)}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


app = make_client_app(
    lambda context: Net(),
    lambda context, part, num_parts: load_data(part, num_parts, 32)[0],
    lambda context, config: FP32Trainer(optimizer=sgd(config["lr"], momentum=0.9)),
    app=app,
)
