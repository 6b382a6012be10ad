"""The client: train and evaluate, each with a loop of its own."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from text_classifier.task import load_data, load_model
from text_classifier.task import test as test_fn
from text_classifier.task import train as train_fn

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = load_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        context.run_config["batch-size"],
    )
    train_fn(model, loader, context.run_config["local-epochs"], message.content["config"]["lr"])
    metrics = MetricRecord({"num-examples": len(loader.dataset)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = load_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, loader = load_data(0, 1, context.run_config["batch-size"])
    loss, accuracy = test_fn(model, loader)
    metrics = MetricRecord(
        {"loss": loss, "accuracy": accuracy, "num-examples": len(loader.dataset)}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
