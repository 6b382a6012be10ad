"""The client: fit and validate by the trainer."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.optim import Adam

from forecast.task import Forecast, Trainer, load_data
from socflower import FP32Trainer, make_client_app

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


app = make_client_app(
    lambda context: Forecast(),
    lambda context, part, num_parts: load_data(part, num_parts, 32)[0],
    lambda context, config: FP32Trainer(
        train_step=lambda lit, batch: lit.training_step(batch, 0),
        optimizer=lambda part: Adam(part, config["lr"]),
    ),
    app=app,
)
