"""An ordinary client. All that minds the heat is the mod."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional

from heat_app.task import load_model, load_points
from socflower import HeatLimits, heat_mod

# This machine has no other user to make way for.
app = ClientApp(mods=[heat_mod(limits=HeatLimits(max_user_load=1.0))])


@app.train()
def train(message: Message, context: Context) -> Message:
    config, model = message.content["config"], load_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = load_points(seed=int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(config["learning-rate"]))
    for _ in range(int(config["local-epochs"])):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train-loss": loss.item(), "num-examples": len(labels)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )
