"""The server: FedAvg, which sends the learning rate to the clients."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from pytorch_quickstart.task import NUM_TRAIN, Net, load_data, test
from socflower import Costs, GroupGrid, SoCFlow, TrainingSchedule, parse_cluster, profile_module

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

    schedule = TrainingSchedule(
        num_samples=NUM_TRAIN, batch_size=batch_size, num_epochs=num_rounds, interval_epochs=1
    )
    strategy = SoCFlow(
        cluster=parse_cluster({"boards": 2, "socs_per_board": 2}),
        groups=2,
        schedule=schedule,
        costs=Costs(model_profile=profile_module(model, (3, 32, 32), "quickstart")),
    )
    result = strategy.start(
        grid=GroupGrid(grid),
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=strategy.num_rounds,
        evaluate_fn=global_evaluate,
    )
    if context.run_config["final-model"]:
        torch.save(result.arrays.to_torch_state_dict(), context.run_config["final-model"])
