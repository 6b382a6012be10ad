"""The server: `num-rounds` synchronisations under one of two strategies, each marked in a file with its time."""

import hashlib
import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import load_model, load_training_data, test_scores

from socflower.cluster import parse_cluster
from socflower.strategies.group_grid import GroupGrid
from socflower.strategies.settings import TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.training.model_state import frozen_digest, load_trainable_state, trainable_state

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train; round k's line is written when all its replies have been aggregated."""
    config = context.run_config
    num_nodes, num_rounds = int(config["num-nodes"]), int(config["num-rounds"])
    batch_size = int(config["batch-size"])
    name = str(config["model"])
    model, num_samples = load_model(name), len(load_training_data(name))
    marks = Path(str(config["marks"]))

    def mark(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        weights = arrays.to_torch_state_dict()
        line = {
            "round": server_round,
            "time_s": time.time(),
            "model_bytes": sum(
                tensor.numel() * tensor.element_size() for tensor in weights.values()
            ),
            "sha256": hashlib.sha256(
                b"".join(tensor.numpy().tobytes() for tensor in weights.values())
            ).hexdigest(),
        }
        if server_round == num_rounds:
            load_trainable_state(model, weights)
            line |= test_scores(name, model)
        with marks.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        return MetricRecord({})

    while len(list(grid.get_node_ids())) < num_nodes:
        time.sleep(0.5)
    initial = ArrayRecord(trainable_state(model))
    frozen = {"frozen-sha256": digest} if (digest := frozen_digest(model)) else {}
    if config["strategy"] == "fedavg":
        FedAvg(
            fraction_evaluate=0.0, min_train_nodes=num_nodes, min_available_nodes=num_nodes
        ).start(
            grid,
            initial,
            num_rounds=num_rounds,
            evaluate_fn=mark,
            train_config=ConfigRecord({"local-epochs": 1, "batch-size": batch_size, **frozen}),
        )
    else:
        SoCFlow(
            cluster=parse_cluster({"boards": 1, "socs_per_board": num_nodes}),
            groups=int(config["num-groups"]),
            schedule=TrainingSchedule(
                num_samples=num_samples,
                batch_size=batch_size,
                num_epochs=num_rounds,
                interval_epochs=1.0,
            ),
        ).start(
            GroupGrid(grid),
            initial,
            num_rounds=num_rounds,
            evaluate_fn=mark,
            train_config=ConfigRecord(frozen),
        )
