"""The problem of a pipeline from a torch model and a cluster, as a strategy takes it."""

from torch import nn

from socflower.capture.graph import Example
from socflower.cluster import Cluster
from socflower.errors import ConfigError, require_range
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.estimates import estimated_problem
from socflower.pipeline.profiler.layers import Granularity, read_model

PARTS = (4, 8, 16, 32)
"""Of a mini-batch, that are micro-batches by default."""


def pipeline_problem(
    module: nn.Module, example: Example, cluster: Cluster, *, batch_size: int, name: str = "", cuts: str = "layers",
    optimizer_copies: float = 1.0, num_socs: int | None = None,
) -> PipelineProblem:
    """Return what a pipeline of a model on a cluster is planned for, with seconds estimated from the catalogue.

    Parameters
    ----------
    module : nn.Module
        The model, of one input tensor; only shapes are read.
    example : Tensor or tuple of int
        A batch of inputs, of which the first sample is used, or the shape of one float32 sample.
    cluster : Cluster
        Its devices, with their memory, and its links.
    batch_size : int
        Samples of one update of the weights, over all devices.
    cuts : str
        "layers", "blocks" or "operations": where the model may be cut.
    optimizer_copies : float
        Optimiser state by trained weights: 1 for SGD with momentum, 2 for Adam.
    num_socs : int, optional
        How many of the cluster's slots take part; default all.

    Raises
    ------
    ConfigError
        If the model cannot be cut.
    """
    require_range("pipeline", least=1, batch_size=batch_size)
    if cuts not in {each.value for each in Granularity}:
        raise ConfigError(f"pipeline: cuts = {cuts!r} is unknown; use {', '.join(each.value for each in Granularity)}")
    model = read_model(module, example, name or type(module).__name__, granularity=Granularity(cuts)).model
    size = micro_batch_choices(batch_size)[0]
    return estimated_problem(model, cluster, socs=None if num_socs is None else range(num_socs), micro_batch_size=size,
                             num_micro_batches=batch_size // size, optimizer_copies=optimizer_copies)


def micro_batch_choices(batch_size: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches that planners try by default: whole parts of the mini-batch."""
    return tuple(batch_size // part for part in PARTS if batch_size % part == 0) or (batch_size,)
