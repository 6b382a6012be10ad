"""The server: rounds of SoCFlow with or without re-balancing; a file gets each round's groups and events."""

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from task import load_model, num_samples

from socflower.cluster import parse_cluster
from socflower.hierarchy import Rebalancing
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and mark the end of every round."""
    config = context.run_config
    num_nodes, num_rounds = int(config["num-nodes"]), int(config["num-rounds"])
    steps, marks = int(config["rebalance-steps"]), Path(str(config["marks"]))
    while len(list(grid.get_node_ids())) < num_nodes:
        time.sleep(0.5)
    strategy = SoCFlow(
        cluster=parse_cluster({"boards": 1, "socs_per_board": num_nodes}),
        groups=int(config["num-groups"]),
        schedule=TrainingSchedule(
            num_samples=num_samples(dict(config)),
            batch_size=int(config["batch-size"]),
            num_epochs=num_rounds,
            interval_epochs=1.0,
        ),
        rebalancing=Rebalancing(steps=steps) if steps >= 0 else None,
    )

    def mark(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        events = strategy.reports[-1].events if strategy.reports else ()
        line = {
            "round": server_round,
            "time_s": time.time(),
            "events": [event.text for event in events],
            "groups": [list(group.members) for group in strategy.plan.groups],
        }
        with marks.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        return MetricRecord({})

    strategy.start(
        GroupGrid(grid),
        ArrayRecord(load_model().state_dict()),
        num_rounds=num_rounds,
        evaluate_fn=mark,
    )
