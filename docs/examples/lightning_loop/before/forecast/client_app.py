"""The client: fit and validate by the trainer."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from forecast.task import Forecast, Trainer, load_data

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    module = Forecast(message.content["config"]["lr"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        context.run_config["batch-size"],
    )
    Trainer(context.run_config["local-epochs"]).fit(module, loader)
    metrics = MetricRecord({"num-examples": len(loader.dataset)})
    return Message(
        RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    module = Forecast()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, loader = load_data(0, 1, context.run_config["batch-size"])
    metrics = MetricRecord(
        {"loss": Trainer().validate(module, loader), "num-examples": len(loader.dataset)}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
