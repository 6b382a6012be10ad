"""The server: SplitReplay in place of FedAvg.

Without a cloud both halves train in the clients' processes, in the order in which virtual time has it. To train with a
real one, start it and say where it is:

    socflower cloud serve split_app.task:program --listen 10.0.0.1:28400 --token-file cloud-token
    flwr run . rack --stream --run-config 'cloud="10.0.0.1:28400" cloud-token-file="cloud-token"'
"""

from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from socflower import (
    CloudClient,
    CloudOperator,
    SplitReplay,
    WindowSchedule,
    adaptive_party,
    cut_shapes,
    device,
    evaluate,
    generate_bandwidth_profile,
    load_data,
    parse_cluster,
    profile_module,
    read_token,
    split_costs,
)
from split_app.task import SHAPE, load_model, load_samples, program

app = ServerApp()


def cloud_of(context: Context) -> CloudClient | None:
    address = str(context.run_config["cloud"])
    if not address:
        return None
    token = read_token(Path(str(context.run_config["cloud-token-file"])))
    return CloudClient(CloudOperator(address=address, token=token), program)


@app.main()
def main(grid: Grid, context: Context) -> None:
    model, data = load_model(), load_data("digits")
    num_edges, batch_size, num_epochs = (
        int(context.run_config[key]) for key in ("edges", "batch-size", "epochs")
    )
    batches_per_epoch = len(load_samples(0, num_edges)) // batch_size

    profile = profile_module(model, SHAPE, "vgg-tiny")
    costs = split_costs(
        profile,
        cut_shapes(program.split, profile),
        device("raspberry-pi-4b"),
        device("gpu-v100"),
        batch_size,
    )
    # Gradients may come later as weights change less.
    parties = [
        adaptive_party(
            costs,
            generate_bandwidth_profile("wifi", seed=edge, duration_s=600.0),
            num_batches=batches_per_epoch * num_epochs,
            window=WindowSchedule(steps=((0.0, 1), (0.5, 5))),
        )
        for edge in range(num_edges)
    ]

    def evaluate_whole(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        accuracy = evaluate(model, data.test).accuracy
        print(f"round {server_round}: accuracy {accuracy:.3f}", flush=True)
        return MetricRecord({"accuracy": accuracy})

    cloud = cloud_of(context)
    strategy = SplitReplay(
        cluster=parse_cluster(
            {"boards": 1, "socs_per_board": num_edges, "device": "raspberry-pi-4b"}
        ),
        parties=parties,
        edge_names=program.edge_names,
        fingerprint=program.fingerprint(),
        batches_per_epoch=batches_per_epoch,
        num_epochs=num_epochs,
        cloud=cloud,
    )
    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=strategy.num_rounds,
        evaluate_fn=evaluate_whole,
    )
    if cloud is not None:
        cloud.close()
