"""The server: FedAvg, which sends the learning rate to the clients."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from pytorch_fedavg.task import load_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_train=1.0)
    result = strategy.start(
        grid, ArrayRecord(load_model().state_dict()), num_rounds=int(context.run_config["num-server-rounds"]),
        train_config=ConfigRecord({"lr": float(context.run_config["learning-rate"])}))
    for server_round, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {server_round}: accuracy {metrics['accuracy']:.3f}", flush=True)
    if context.run_config["final-model"]:
        torch.save(result.arrays.to_torch_state_dict(), str(context.run_config["final-model"]))
