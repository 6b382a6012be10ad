"""The server: SoCFlow in place of FedAvg. Two boards with two SoCs each, as in `../rack.toml`."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from pytorch_groups.task import SHAPE, load_images, load_model
from socflower import Costs, GroupGrid, SoCFlow, TrainingSchedule, evaluate, parse_cluster, profile_module

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    model, data = load_model(), load_images(str(context.run_config["data"]))

    def evaluate_global(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        accuracy = evaluate(model, data.test).accuracy
        print(f"round {server_round}: accuracy {accuracy:.3f}", flush=True)
        return MetricRecord({"accuracy": accuracy})

    strategy = SoCFlow(
        cluster=parse_cluster({"boards": 2, "socs_per_board": 2}),
        groups=int(context.run_config["num-groups"]),
        schedule=TrainingSchedule(
            num_samples=len(data.train),
            batch_size=int(context.run_config["batch-size"]),
            num_epochs=int(context.run_config["num-epochs"]),
            interval_epochs=1,
        ),
        costs=Costs(model_profile=profile_module(model, SHAPE, "quickstart")),
    )
    result = strategy.start(GroupGrid(grid), ArrayRecord(model.state_dict()), num_rounds=strategy.num_rounds,
                            evaluate_fn=evaluate_global)
    print(f"gradients inside groups: {strategy.transport}", flush=True)
    if context.run_config["final-model"]:
        torch.save(result.arrays.to_torch_state_dict(), str(context.run_config["final-model"]))
