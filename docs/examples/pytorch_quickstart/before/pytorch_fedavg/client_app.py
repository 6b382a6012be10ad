"""The client: train and evaluate, each with a loop of its own."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pytorch_fedavg.task import Net, load_data, test
from pytorch_fedavg.task import train as train_net

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]),
                          int(context.run_config["batch-size"]))
    loss = train_net(net, loader, int(context.run_config["local-epochs"]), float(message.content["config"]["lr"]))
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, loader = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]),
                          int(context.run_config["batch-size"]))
    loss, accuracy = test(net, loader)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
