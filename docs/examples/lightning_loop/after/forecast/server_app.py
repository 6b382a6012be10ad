"""The server: FedAvg, which sends the learning rate to the clients."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from forecast.task import NUM_TRAIN, Forecast, Trainer, load_data
from socflower import GroupGrid, SoCFlow, TrainingSchedule, parse_cluster

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(1)
    module = Forecast()
    num_rounds, batch_size = (
        int(context.run_config["num-server-rounds"]),
        int(context.run_config["batch-size"]),
    )

    def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        module.load_state_dict(arrays.to_torch_state_dict())
        loss = Trainer().validate(module, load_data(0, 1, batch_size)[1])
        print(f"round {server_round}: loss {loss:.3f}", flush=True)
        return MetricRecord({"loss": loss})

    schedule = TrainingSchedule(
        num_samples=NUM_TRAIN, batch_size=batch_size, num_epochs=num_rounds, interval_epochs=1
    )
    strategy = SoCFlow(
        cluster=parse_cluster({"boards": 2, "socs_per_board": 2}), groups=2, schedule=schedule
    )
    result = strategy.start(
        grid=GroupGrid(grid),
        initial_arrays=ArrayRecord(module.state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=strategy.num_rounds,
        evaluate_fn=global_evaluate,
    )
    if context.run_config["final-model"]:
        torch.save(result.arrays.to_torch_state_dict(), context.run_config["final-model"])
