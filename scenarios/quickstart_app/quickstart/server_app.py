"""The server: SoCFlow in place of FedAvg. One shelf of eight SoCs, four on each of two boards."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from quickstart.task import load_model
from socflower import (
    Costs,
    GroupGrid,
    SoCFlow,
    TrainingSchedule,
    evaluate,
    load_data,
    parse_cluster,
    profile_module,
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and print the accuracy after every synchronisation."""
    model, data = load_model(), load_data("digits")

    def evaluate_global(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        accuracy = evaluate(model, data.test).accuracy
        print(f"round {server_round}: accuracy {accuracy:.3f}", flush=True)
        return MetricRecord({"accuracy": accuracy})

    strategy = SoCFlow(
        cluster=parse_cluster({"boards": 2, "socs_per_board": 4}),
        groups=int(context.run_config["num-groups"]),
        schedule=TrainingSchedule(
            num_samples=len(data.train),
            batch_size=int(context.run_config["batch-size"]),
            num_epochs=int(context.run_config["num-epochs"]),
        ),
        costs=Costs(model_profile=profile_module(model, (1, 28, 28), "lenet5")),
    )
    strategy.start(
        GroupGrid(grid),
        ArrayRecord(model.state_dict()),
        num_rounds=strategy.num_rounds,
        evaluate_fn=evaluate_global,
    )
