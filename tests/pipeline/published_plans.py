"""Published examples of the planners of PipeDream and DAPPLE: their profiles and the plans that they print.

Sources: the repositories msr-fiddle/pipedream (`profiler/image_classification/profiles/vgg16/graph.txt`, MIT License;
plans printed by its `optimizer_graph_hierarchical.py` with `--activation_compression_ratio 1` and the default of
1 GB/s; its README runs the first) and AlibabaPAI/DAPPLE (`profiling_results/vgg-19-pbs-32.txt`,
`bert-48-pbs-2.txt`, modified BSD License; its runtime's code holds the plans: `run_15_1_pipeline.sh`, and "23:25" in
`bert.py`). A row is a layer: name, milliseconds of the forward and backward pass, bytes of output and of weights, for
a whole profiled batch. Nodes without computation (the input, a tensor's size) are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from socflower.cluster import Board, Cluster, Device, Processor
from socflower.cluster.cost_model import LayerProfile
from socflower.pipeline.plan import PipelinePlan, Stage
from socflower.pipeline.planner.allocation import class_shares
from socflower.pipeline.problem import (
    LayerSeconds,
    PipelineDevice,
    PipelineModel,
    PipelineProblem,
)
from socflower.pipeline.schedule.order import ASTEROID

Profile = Sequence[tuple[str, float, float, int, int]]

VGG16_BATCH = 128
VGG16: Profile = (
    ("Conv2d", 22.307, 24.613, 1644167168, 7168),
    ("ReLU", 4.446, 5.553, 1644167168, 0),
    ("Conv2d", 46.201, 113.33, 1644167168, 147712),
    ("ReLU", 4.455, 5.311, 1644167168, 0),
    ("MaxPool2d", 3.795, 5.579, 411041792, 0),
    ("Conv2d", 15.155, 39.648, 822083584, 295424),
    ("ReLU", 2.359, 2.738, 822083584, 0),
    ("Conv2d", 22.062, 53.379, 822083584, 590336),
    ("ReLU", 2.513, 2.62, 822083584, 0),
    ("MaxPool2d", 2.211, 2.788, 205520896, 0),
    ("Conv2d", 10.814, 18.335, 411041792, 1180672),
    ("ReLU", 1.377, 1.38, 411041792, 0),
    ("Conv2d", 17.458, 27.023, 411041792, 2360320),
    ("ReLU", 1.64, 1.463, 411041792, 0),
    ("Conv2d", 14.245, 33.888, 411041792, 2360320),
    ("ReLU", 1.549, 1.321, 411041792, 0),
    ("MaxPool2d", 1.169, 1.513, 102760448, 0),
    ("Conv2d", 9.249, 14.574, 205520896, 4720640),
    ("ReLU", 1.026, 0.696, 205520896, 0),
    ("Conv2d", 15.359, 21.9, 205520896, 9439232),
    ("ReLU", 0.848, 0.679, 205520896, 0),
    ("Conv2d", 11.775, 28.67, 205520896, 9439232),
    ("ReLU", 0.881, 0.642, 205520896, 0),
    ("MaxPool2d", 0.802, 0.781, 51380224, 0),
    ("Conv2d", 5.608, 7.381, 51380224, 9439232),
    ("ReLU", 0.784, 0.266, 51380224, 0),
    ("Conv2d", 4.07, 7.396, 51380224, 9439232),
    ("ReLU", 0.463, 0.19, 51380224, 0),
    ("Conv2d", 4.042, 8.648, 51380224, 9439232),
    ("ReLU", 0.455, 0.175, 51380224, 0),
    ("MaxPool2d", 0.553, 0.234, 12845056, 0),
    ("View", 0, 0, 12845056, 0),
    ("Linear", 2.475, 4.575, 2097152, 411058176),
    ("ReLU", 0.377, 0.03, 2097152, 0),
    ("Dropout", 0, 0, 2097152, 0),
    ("Linear", 0.709, 0.734, 2097152, 67125248),
    ("ReLU", 0.277, 0.032, 2097152, 0),
    ("Dropout", 0, 0, 2097152, 0),
    ("Linear", 0.393, 0.548, 512000, 16388000),
)

VGG19_BATCH = 32
VGG19: Profile = (
    ("Conv2d_1_1", 3.4, 6.8, 384000000, 6835),
    ("Conv2d_1_2", 7.2, 14.4, 384000000, 140869),
    ("MaxPool2d_1", 0.65, 1.3, 96000000, 0),
    ("Conv2d_2_1", 3.4, 6.8, 192000000, 281738),
    ("Conv2d_2_2", 5, 10, 192000000, 562988),
    ("MaxPool2d_2", 0.3, 0.6, 48000000, 0),
    ("Conv2d_3_1", 2.3, 4.6, 96000000, 1125976),
    ("Conv2d_3_2", 3.55, 7.1, 96000000, 2250976),
    ("Conv2d_3_3", 3.55, 7.1, 96000000, 2250976),
    ("Conv2d_3_4", 3.55, 7.1, 96000000, 2250976),
    ("MaxPool2d_3", 0.165, 0.33, 24000000, 0),
    ("Conv2d_4_1", 1.71, 3.42, 48000000, 4501953),
    ("Conv2d_4_2", 2.9, 5.8, 48000000, 9001953),
    ("Conv2d_4_3", 2.88, 5.76, 48000000, 9001953),
    ("Conv2d_4_4", 2.86, 5.72, 48000000, 9001953),
    ("MaxPool2d_4", 0.1, 0.2, 12000000, 0),
    ("Conv2d_5_1", 0.965, 1.93, 12000000, 9001953),
    ("Conv2d_5_2", 0.965, 1.93, 12000000, 9001953),
    ("Conv2d_5_3", 0.96, 1.92, 12000000, 9001953),
    ("Conv2d_5_4", 0.965, 1.93, 12000000, 9001953),
    ("MaxPool2d_5", 0.03, 0.06, 3000000, 0),
    ("FC1", 0.45, 0.9, 500000, 392015625),
    ("FC2", 0.1, 0.2, 500000, 64015625),
    ("Prediction", 0.05, 0.1, 128000, 15628814),
    ("Loss", 0.01, 0.2, 2000000, 0),
)

BERT48_BATCH = 2
BERT48: Profile = (
    ("embeddings", 0.056, 0.0, 4325376, 127131648),
    *((f"layer {index}", 2.69, 4.47, 4325376, 50384896) for index in range(48)),
    ("pooler", 0.0, 0.0, 0, 4198400),
)


GPU = Device(
    name="gpu",
    idle_w=50.0,
    network_w=0.0,
    memory_bytes=16e9,
    memory_bytes_per_s=9e11,
    layer_overhead_s=0.0,
    processors={"gpu": Processor(name="gpu", flops_per_s=1e13, active_w=300.0)},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A problem with equal workers, and its published plan as (last layer, replicas) of each stage."""

    name: str
    problem: PipelineProblem
    profile: Profile
    bytes_per_s: float
    published: tuple[tuple[int, int], ...]
    source: str

    def published_plan(self) -> PipelinePlan:
        """Return the published plan with equal shares and the K of F28."""
        counts = ASTEROID.counts(len(self.published), self.problem.num_micro_batches)
        stages, first, begin = [], 0, 0
        for (last, replicas), count in zip(self.published, counts, strict=True):
            stages.append(
                Stage(
                    first_layer=first,
                    last_layer=last,
                    devices=tuple(range(begin, begin + replicas)),
                    shares=tuple(class_shares(self.problem.micro_batch_size, replicas)),
                    in_flight=count,
                )
            )
            first, begin = last + 1, begin + replicas
        return PipelinePlan(
            stages=tuple(stages),
            micro_batch_size=self.problem.micro_batch_size,
            num_micro_batches=self.problem.num_micro_batches,
            planner=self.source,
        )


def examples() -> tuple[Example, ...]:
    """Return the published examples with a chain of layers and a printed plan."""
    return (
        _example(
            "VGG-16, 4 workers, 1 GB/s",
            VGG16,
            VGG16_BATCH,
            4,
            1e9,
            ((16, 3), (38, 1)),
            "PipeDream",
            micro_batch_size=128,
            num_micro_batches=8,
        ),
        _example(
            "VGG-16, 16 workers, 1 GB/s",
            VGG16,
            VGG16_BATCH,
            16,
            1e9,
            ((23, 13), (30, 2), (38, 1)),
            "PipeDream",
            micro_batch_size=128,
            num_micro_batches=8,
        ),
        # Servers of one GPU; its runtime divides the layers behind block 4.
        _example(
            "VGG-19, 16 workers, 10 Gbps",
            VGG19,
            VGG19_BATCH,
            16,
            1.25e9,
            ((15, 15), (24, 1)),
            "DAPPLE",
            micro_batch_size=480,
            num_micro_batches=4,
        ),
        # Two servers of 8 GPUs: 130 GB/s inside, 25 Gbps between; its runtime has 25 of 51 parts of
        # the graph in the first stage, embeddings and layers 0 to 22.
        _example(
            "BERT-48, 2 x 8 workers, 25 Gbps",
            BERT48,
            BERT48_BATCH,
            16,
            1.3e11,
            ((23, 8), (49, 8)),
            "DAPPLE",
            micro_batch_size=16,
            num_micro_batches=4,
            per_server=8,
            server_bytes_per_s=3.125e9,
        ),
    )


def _layers(profile: Profile, batch: int) -> tuple[LayerProfile, ...]:
    return tuple(
        LayerProfile(
            name=layer,
            forward_flops=0.0,
            weight_bytes=float(weights),
            output_bytes=output / batch,
            crossing_bytes=output / batch,
        )
        for layer, _, _, output, weights in profile
    )


def _example(
    name: str,
    profile: Profile,
    batch: int,
    num_workers: int,
    bytes_per_s: float,
    published: tuple[tuple[int, int], ...],
    source: str,
    *,
    micro_batch_size: int,
    num_micro_batches: int,
    per_server: int | None = None,
    server_bytes_per_s: float | None = None,
) -> Example:
    """Return an example; seconds and bytes are proportional to the samples, as in both planners."""
    slots = per_server or num_workers
    board = Board(
        num_slots=slots,
        device=GPU,
        soc_bytes_per_s=bytes_per_s,
        uplink_bytes_per_s=server_bytes_per_s or slots * bytes_per_s,
    )
    seconds = LayerSeconds(
        device="gpu",
        batches=(batch,),
        forward_s=np.array([[row[1] * 1e-3] for row in profile]),
        backward_s=np.array([[row[2] * 1e-3] for row in profile]),
    )
    problem = PipelineProblem(
        model=PipelineModel(name=name, layers=_layers(profile, batch), input_bytes=0.0),
        devices=tuple(
            PipelineDevice(soc=soc, name=f"gpu {soc}", seconds=seconds, memory_bytes=1e15)
            for soc in range(num_workers)
        ),
        cluster=Cluster(
            name=name,
            boards=(board,) * (num_workers // slots),
            hub_bytes_per_s=bytes_per_s,
            message_s=0.0,
        ),
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
    )
    return Example(
        name=name,
        problem=problem,
        profile=profile,
        bytes_per_s=bytes_per_s,
        published=published,
        source=source,
    )
