"""The server: FedAvg, which sends the learning rate to the clients."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from pytorch_quickstart.task import Net, load_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(1)
    model = Net()
    num_rounds, batch_size = (
        int(context.run_config["num-server-rounds"]),
        int(context.run_config["batch-size"]),
    )

    def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(model, load_data(0, 1, batch_size)[1], torch.device("cpu"))
        print(f"round {server_round}: accuracy {accuracy:.3f}", flush=True)
        return MetricRecord({"accuracy": accuracy, "loss": loss})

    strategy = FedAvg(fraction_evaluate=0.5)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=num_rounds,
        evaluate_fn=global_evaluate,
    )
    if context.run_config["final-model"]:
        torch.save(result.arrays.to_torch_state_dict(), context.run_config["final-model"])
