"""An ordinary server with Flower's own FedAvg, which prints what the clients say of their heat."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from heat_app.task import accuracy_of, load_model, load_points
from socflower import HEAT, HeatReport

app = ServerApp()


def with_heat(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Average the metrics as FedAvg does, and print a line for each client."""
    for reply in replies:
        heat = HeatReport.decode(reply[HEAT])
        peak = "unknown" if heat.peak_c is None else f"{heat.peak_c:.0f} °C"
        print(
            f"peak {peak}, share {heat.share:.2f}, held {heat.paused_s:.0f} s",
            *heat.notes,
            sep="; ",
            flush=True,
        )
    return aggregate_metricrecords(replies, weighted_by)


@app.main()
def main(grid: Grid, context: Context) -> None:
    model, (inputs, labels) = load_model(), load_points(seed=1000)
    settings = {key: context.run_config[key] for key in ("local-epochs", "learning-rate")}

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        accuracy = accuracy_of(model, inputs, labels)
        print(f"round {server_round}: accuracy {accuracy:.3f}", flush=True)
        return MetricRecord({"accuracy": accuracy})

    strategy = FedAvg(fraction_evaluate=0.0, train_metrics_aggr_fn=with_heat)
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-rounds"]),
        train_config=ConfigRecord(settings),
        evaluate_fn=evaluate,
    )
