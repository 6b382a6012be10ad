"""The planner's problem of a torch module on devices of the catalogue."""

from torch import nn

from socflower.cluster import Cluster
from socflower.errors import ConfigError, require_range
from socflower.model_graph.graph import Example
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.estimates import Int8Socs, default_micro_batches, estimated_problem
from socflower.pipeline.profiler.int8_parts import require_int8
from socflower.pipeline.profiler.layers import Granularity, read_model
from socflower.plain_numbers import plain_numbers


@plain_numbers
def pipeline_problem(
    module: nn.Module,
    example: Example,
    cluster: Cluster,
    *,
    batch_size: int,
    name: str = "",
    cuts: str = "layers",
    optimizer_copies: float = 1.0,
    num_socs: int | None = None,
    int8_socs: Int8Socs = (),
) -> PipelineProblem:
    """Return the planner's problem for a model on a cluster, with seconds estimated from the catalogue.

    Parameters
    ----------
    module : nn.Module
        The model; only shapes are read.
    example : Tensor, tuple or dict
        A batch of inputs, whose first sample is used, or the shape of one float32 sample. Several inputs are a tuple of
        positional or a dict of keyword arguments.
    cluster : Cluster
        Its devices, with their memory, and its links.
    batch_size : int
        Samples of one update of the weights, over all devices.
    cuts : str
        The places where the model may be cut: "layers", "blocks" or "operations".
    optimizer_copies : float
        Optimiser state by trained weights: 1 for SGD with momentum, 2 for Adam.
    num_socs : int, optional
        The number of the cluster's slots that take part; default all.
    int8_socs : sequence of int, or "auto"
        The devices that compute stages in int8, on their fastest int8 processor; masters and optimiser stay in FP32.
        "auto": all devices that have such a processor. A device may get any layers, so all must have int8 kernels.

    Raises
    ------
    ConfigError
        If the model cannot be cut, if int8 has no kernels for it, or for a device without an int8 processor.
    """
    require_range("pipeline", least=1, batch_size=batch_size)
    known = [each.value for each in Granularity]
    if cuts not in known:
        raise ConfigError(f"pipeline: cuts = {cuts!r} is unknown; use {', '.join(known)}")
    read = read_model(module, example, name or type(module).__name__, granularity=Granularity(cuts))
    if int8_socs:
        require_int8(read, module)
    size = default_micro_batches(batch_size)[0]
    return estimated_problem(
        read.model,
        cluster,
        socs=None if num_socs is None else range(num_socs),
        micro_batch_size=size,
        num_micro_batches=batch_size // size,
        optimizer_copies=optimizer_copies,
        int8_socs=int8_socs,
    )
