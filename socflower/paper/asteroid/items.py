"""Our values for each table and figure of Asteroid; long computations have modules of their own."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from socflower.cluster import device
from socflower.paper.asteroid.ablation import figure_15
from socflower.paper.asteroid.convergence import FIGURE_14, figure_14, hetpipe_waves
from socflower.paper.asteroid.methods import NO_FIT, SETTINGS, asteroid, peer, peer_of, timed_plan
from socflower.paper.asteroid.recovery import figure_16, figure_17
from socflower.paper.asteroid.settings import (
    CNNS,
    EPOCH_SAMPLES,
    MODELS,
    NANO,
    NX,
    TX2,
    model_of,
    problem_of,
)
from socflower.paper.asteroid.volumes import enumerated, nearest
from socflower.paper.asteroid.wire_bytes import equations
from socflower.paper.comparison import read_paper
from socflower.pipeline.plan import PipelinePlan
from socflower.pipeline.planner.baselines import Compared
from socflower.pipeline.planner.selection import Planned, plan_pipeline, predict
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.estimates import estimate_seconds
from socflower.pipeline.profiler.layers import Granularity
from socflower.pipeline.schedule.order import ASTEROID

Ours = Mapping[str, float | bool | str]

# The only batch of a device that the paper states (§5.6).
_SAMPLES = 32


def table_1() -> Ours:
    """Return the seconds of an epoch of each model on each device."""
    found = {}
    for name in CNNS:
        model = model_of(name)
        for kind in ("gpu-a100", TX2, NANO):
            seconds, last = estimate_seconds(model, device(kind)), model.num_layers - 1
            sample_s = seconds.both(0, last, 256) / 256
            found[f"{name}/{kind}"] = sample_s * EPOCH_SAMPLES[name]
    return found


def figure_1() -> Ours:
    """Return statements on three Nanos with 32 samples each at 100 Mbps, and on ResNet-50's slow transfer (§5.2)."""
    sync, more = {}, {}
    for name in MODELS:
        problem = problem_of(
            name,
            (NANO,) * 3,
            100,
            micro_batch_size=3 * _SAMPLES,
            num_micro_batches=1,
            granularity=Granularity.BLOCKS,
        )
        parallel = peer_of(problem, "data-parallel")
        pipeline = peer_of(problem, "pipeline-parallel")
        if parallel.plan is not None and parallel.prediction is not None:
            sync[name] = 1.0 - _compute_s(problem) / parallel.prediction.step_s
            if pipeline.plan is not None:
                pipeline_bytes = pipeline.plan.communication_bytes(problem)
                more[name] = pipeline_bytes / parallel.plan.communication_bytes(problem)
    cnns = [name for name in CNNS if name in more]
    sync_is_most = all(sync[name] > 0.5 for name in cnns)
    send_more = all(more[name] > 1.0 for name in cnns)
    straight = peer("pipeline-parallel", "resnet50", "B", 100)
    return {
        "dp synchronisation is most of its time": bool(cnns) and sync_is_most,
        "cnn pipelines send more a sample than dp": bool(cnns) and send_more,
        "bert pipeline sends less a sample than dp": more.get("bert-small", 2.0) < 1.0,
        "transfer over execution, at most": _first_transfer(straight),
    }


def table_2() -> Ours:
    """Return the megabytes of a mini-batch of our plans on five Nanos, and whether virtual time sends as many.

    Keys with "nearest" are of the enumerated plan that is nearest to the paper's volume (`volumes`).
    """
    found: dict[str, float | bool | str] = {}
    equal = True
    for name in CNNS:
        plans: tuple[tuple[str, Planned | Compared], ...] = (
            ("hpp", asteroid(name, "A", 100)),
            ("hdp", peer("hetpipe", name, "A", 100)),
        )
        for kind, planned in plans:
            if planned.plan is None or planned.prediction is None:
                found[f"{name}/{kind}"] = NO_FIT
                continue
            num_bytes = planned.plan.communication_bytes(planned.problem)
            sent = sum(planned.prediction.num_bytes.values())
            equal = equal and abs(sent - num_bytes) <= 1e-9 * max(sent, 1.0)
            found[f"{name}/{kind}"] = num_bytes / 1e6
    for cell in read_paper("asteroid").item("table-2").cells:
        name, _, kind = cell.key.removesuffix(" nearest").partition("/")
        if cell.key.endswith(" nearest") and cell.value is not None:
            plan = nearest(name, kind, cell.value * 1e6)
            problem, _ = enumerated(name, kind)
            found[cell.key] = NO_FIT if plan is None else plan.communication_bytes(problem) / 1e6
    return {**found, "bytes of the task graph equal Eqs. 1 and 2": equal}


_TABLE_4_PEERS = {"device": "single-device", "dp": "data-parallel", "dp over one link": "eddl",
                  "pp": "pipeline-parallel"}  # fmt: skip


def table_4() -> Ours:
    """Return the speed-ups of our plans over one device, data parallelism and a straight pipeline."""
    found: dict[str, float | bool | str] = {}
    for name in MODELS:
        for environment, mbps in (("A", 100), ("B", 100), ("B", 1000)):
            ours_s = asteroid(name, environment, mbps).prediction.step_s
            for key, system in _TABLE_4_PEERS.items():
                other = peer(system, name, environment, mbps)
                found[f"{name}/{environment}/{mbps}/{key}"] = _over(other, ours_s)
    return found


def figure_5() -> Ours:
    """Return whether activations of 32 samples are more than half of the memory of a step."""
    labels = {
        "efficientnet-b1": "EfficientNet-B1",
        "mobilenet-v2": "MobileNetV2",
        "resnet50": "ResNet-50",
    }
    found = {}
    for name, label in labels.items():
        model = model_of(name)
        whole = (0, model.num_layers - 1)
        kept = _SAMPLES * model.kept_bytes(*whole)
        found[f"activations are most of it, {label}"] = kept > model.state_bytes(*whole, 1.0)
    return found


def figure_6() -> Ours:
    """Return whether a sample takes 10 % less in a batch of 32 than alone."""
    model = model_of("efficientnet-b1")
    found = {}
    for label, kind in (("TX2", TX2), ("NX", NX)):
        seconds, last = estimate_seconds(model, device(kind)), model.num_layers - 1
        alone_s, batch_s = (seconds.both(0, last, size) for size in (1, 32))
        found[f"seconds a sample fall with the batch, {label}"] = batch_s / 32 < 0.9 * alone_s
    return found


def figure_12() -> Ours:
    """Return whether the plans of Table 4 have the shapes that the prose describes."""
    widths: dict[str, list[list[int]]] = {name: [] for name in MODELS}
    for name, own in widths.items():
        for environment, mbps in (("A", 100), ("B", 100), ("B", 1000)):
            for pipeline in asteroid(name, environment, mbps).plan.pipelines:
                own.append([len(stage.devices) for stage in pipeline.stages])
    several = [own for name in CNNS for own in widths[name] if len(own) > 1]
    straight = [max(own) == 1 < len(own) for own in widths["bert-small"]]
    return {
        "cnn plans replicate early layers": all(own[0] == max(own) > 1 for own in several),
        "bert plan is a straight pipeline": all(straight),
    }


def figure_13() -> Ours:
    """Return the least and the greatest speed-up over each system, on environments B and C at 100 Mbps.

    Plans that exceed a board's memory are left out, as the figure crosses them out. HetPipe's mini-batch takes the
    seconds of a wave, as in Fig. 14.
    """
    found: dict[str, float | bool | str] = {}
    for system in ("eddl", "pipedream", "dapple", "hetpipe"):
        ratios: list[float] = []
        for name in MODELS:
            for environment in ("B", "C"):
                ours_s = asteroid(name, environment, 100).prediction.step_s
                if system == "hetpipe":
                    waves = hetpipe_waves(name, environment, FIGURE_14.most_waves)
                    ratio = NO_FIT if waves is None else waves.wave_s / ours_s
                else:
                    ratio = _over(peer(system, name, environment, 100), ours_s)
                if not isinstance(ratio, str):
                    ratios.append(ratio)
        found[f"least over {system}"] = min(ratios, default=NO_FIT)
        found[f"most over {system}"] = max(ratios, default=NO_FIT)
    return found


def figure_18() -> Ours:
    """Return statements on one to eight Nanos with 32 samples each and 16 micro-batches."""
    per_s: dict[tuple[str, int], float] = {}
    over: dict[str, list[float]] = {"dp": [], "dp over one link": []}
    for name in ("efficientnet-b1", "mobilenet-v2"):
        alone = peer_of(_scaled(name, 1), "single-device").prediction
        assert alone is not None
        per_s[name, 1] = alone.samples_per_s
        for size in (2, 4, 6, 8):
            problem = _scaled(name, size)
            ours = plan_pipeline(problem, SETTINGS)
            per_s[name, size] = ours.prediction.samples_per_s
            for key, ratios in over.items() if name == "efficientnet-b1" else ():
                ratio = _over(peer_of(problem, _TABLE_4_PEERS[key]), ours.prediction.step_s)
                if not isinstance(ratio, str):
                    ratios.append(ratio)
    found: dict[str, float | bool | str] = {}
    for key, ratios in over.items():
        found[f"efficientnet-b1: least over {key}"] = min(ratios, default=NO_FIT)
        found[f"efficientnet-b1: most over {key}"] = max(ratios, default=NO_FIT)
    pipelines = {size: _scaled_pipeline(size) for size in (2, 4, 6)}
    two, four = (_samples_per_s(pipelines[size]) for size in (2, 4))
    speed_up = per_s["mobilenet-v2", 8] / per_s["mobilenet-v2", 1]
    fitting = [_fits_at_full_depth(pipelines[size]) for size in (4, 6)]
    return {
        **found,
        "mobilenet-v2: speed-up of eight is near linear": speed_up >= 6,
        "gpipe is slower with four stages than with two": four < two,
        "out of memory from six devices on": fitting == [True, False],
    }


def table_7() -> Ours:
    """Return the seconds that this machine takes to plan environment C."""
    return {name: timed_plan(name, "C", 100)[1] for name in MODELS}


def table_8() -> Ours:
    """Return the ratios of the seconds of one pass of every layer at each batch size, over all models."""
    total_s = {kind: 0.0 for kind in (NANO, TX2, NX)}
    for name in MODELS:
        model = model_of(name)
        for kind in total_s:
            seconds, last = estimate_seconds(model, device(kind)), model.num_layers - 1
            for power in range(6 if name == "resnet50" else 9):
                total_s[kind] += seconds.both(0, last, 1 << power)
    return {
        "nano over tx2": total_s[NANO] / total_s[TX2],
        "tx2 over nx": total_s[TX2] / total_s[NX],
    }


def energy() -> Ours:
    """Return the joules of a sample of EfficientNet-B1 on environment D, and data parallelism's joules over them."""
    ours = asteroid("efficientnet-b1", "D", 100).prediction
    own_j = ours.energy_j / ours.num_samples
    found: dict[str, float | bool | str] = {
        "joules a sample": own_j,
        "data parallelism over it": NO_FIT,
    }
    parallel = peer("data-parallel", "efficientnet-b1", "D", 100).prediction
    if parallel is not None:
        found["data parallelism over it"] = parallel.energy_j / parallel.num_samples / own_j
    return found


COMPUTE: Mapping[str, Callable[[], Ours]] = {
    "table-1": table_1, "figure-1": figure_1, "table-2": table_2, "equations": equations, "table-4": table_4,
    "figure-5": figure_5, "figure-6": figure_6, "figure-12": figure_12, "figure-13": figure_13, "figure-14": figure_14,
    "figure-15": figure_15, "figure-16": figure_16, "figure-17": figure_17, "figure-18": figure_18, "table-7": table_7,
    "table-8": table_8, "energy": energy,
}  # fmt: skip


def _over(planned: Compared, ours_s: float) -> float | str:
    """Return a peer's seconds over ours, or `NO_FIT`."""
    if not planned.fits or planned.prediction is None:
        return NO_FIT
    return planned.prediction.step_s / ours_s


def _compute_s(problem: PipelineProblem) -> float:
    """Return the seconds of the passes of an even share on the first device."""
    seconds, last = problem.devices[0].seconds, problem.model.num_layers - 1
    share = problem.micro_batch_size // len(problem.devices)
    return problem.num_micro_batches * seconds.both(0, last, share)


def _first_transfer(planned: Compared) -> float | str:
    """Return the seconds of both transfers between the first two stages over those of the first stage's passes."""
    plan, problem = planned.plan, planned.problem
    if not isinstance(plan, PipelinePlan):
        return NO_FIT
    first, second = plan.stages[:2]
    seconds, size = problem.device(first.devices[0]).seconds, plan.micro_batch_size
    executing_s = seconds.both(0, first.last_layer, size)
    crossing = 2.0 * size * problem.model.layers[first.last_layer].output_bytes
    return crossing / problem.bandwidth(first.devices[0], second.devices[0]) / executing_s


def _scaled(name: str, size: int, granularity: Granularity = Granularity.LAYERS) -> PipelineProblem:
    return problem_of(
        name,
        (NANO,) * size,
        100,
        micro_batch_size=_SAMPLES * size,
        num_micro_batches=16,
        granularity=granularity,
    )


def _scaled_pipeline(size: int) -> tuple[PipelineProblem, PipelinePlan]:
    problem = _scaled("efficientnet-b1", size, Granularity.BLOCKS)
    plan = peer_of(problem, "pipeline-parallel").plan
    assert isinstance(plan, PipelinePlan)
    return problem, plan


def _samples_per_s(case: tuple[PipelineProblem, PipelinePlan]) -> float:
    return predict(*case, within_memory=False).samples_per_s


def _fits_at_full_depth(case: tuple[PipelineProblem, PipelinePlan]) -> bool:
    """Return whether the pipeline keeps its budgets with the paper's K in each stage."""
    problem, plan = case
    counts = ASTEROID.counts(len(plan.stages), plan.num_micro_batches)
    for stage, count in zip(plan.stages, counts, strict=True):
        deeper = replace(stage, in_flight=count)
        for soc, share in stage.members:
            if deeper.memory_bytes(problem, share) > problem.device(soc).memory_bytes:
                return False
    return True
