"""The server: SoCFlow on the machines of `cluster.toml`."""

from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from my_app.task import EXAMPLE, make_model, test_scores, training_data
from socflower import Costs, GroupGrid, SoCFlow, TrainingSchedule, load_cluster, profile_module

CLUSTER = Path(__file__).parents[1] / "cluster.toml"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the scores on test data after every synchronisation."""
    model, config = make_model(context), context.run_config

    def evaluate_global(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        scores = {name: float(score) for name, score in test_scores(model).items()}
        printed = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
        print(f"round {server_round}: {printed}", flush=True)
        return MetricRecord(scores)

    strategy = SoCFlow(
        cluster=load_cluster(CLUSTER),
        groups=int(config["num-groups"]),
        schedule=TrainingSchedule(
            num_samples=len(training_data(context, 0, 1)),
            batch_size=int(config["batch-size"]),
            num_epochs=int(config["num-epochs"]),
            interval_epochs=1,
        ),
        costs=Costs(model_profile=profile_module(model, EXAMPLE, "my-app")),
    )
    strategy.start(
        GroupGrid(grid),
        ArrayRecord(model.state_dict()),
        num_rounds=strategy.num_rounds,
        evaluate_fn=evaluate_global,
    )
