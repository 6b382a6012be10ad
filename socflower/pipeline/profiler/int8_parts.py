"""Layers of a pipeline's model in int8: one tensor in, one tensor out, operators with int8 kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from socflower.errors import ConfigError
from socflower.model_graph.chain import ModelChain, joined
from socflower.model_graph.graph import Operation
from socflower.model_graph.parts import part_of
from socflower.pipeline.profiler.layers import Granularity, ReadModel
from socflower.precision.int8.network import UnsupportedOperator
from socflower.training.int8_layers import Int8Layers


@dataclass(frozen=True, kw_only=True)
class Int8Part:
    """Consecutive layers as a module of one tensor in and one out, which shares the model's weights."""

    module: nn.Module
    # Of one sample, as the output's.
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    # For messages.
    name: str

    def layers(
        self, *, seed: int = 0, input_gradient: bool = False, num_passes: int = 1
    ) -> Int8Layers:
        """Return the layers in int8; see `Int8Layers`. Raises `ConfigError` if int8 has no kernels for them."""
        try:
            return Int8Layers(
                self.module,
                self.input_shape,
                self.output_shape,
                seed=seed,
                input_gradient=input_gradient,
                num_passes=num_passes,
            )
        except ConfigError as error:
            why = error.what if isinstance(error, UnsupportedOperator) else error
            raise ConfigError(f"pipeline: {self.name}: {why}; leave int8_socs out") from None


def int8_part(
    module: nn.Module,
    chain: ModelChain,
    first: int,
    last: int,
) -> Int8Part:
    """Return pieces `first` to `last` of a model for int8.

    Raises `ConfigError` unless one float32 tensor enters and one leaves.
    """
    whole = joined(chain.graph, chain.pieces[first : last + 1])
    names = chain.names
    entering = _only(whole.entering or chain.graph.inputs, f"into layer {first} ({names[first]})")
    leaving = _only(whole.leaving or chain.graph.results, f"out of layer {last} ({names[last]})")
    part = part_of(
        module,
        chain.graph,
        whole.operations,
        -1,
        start=entering if whole.entering else None,
        end=leaving if whole.leaving else None,
    )
    what = f"layer {first} ({names[first]})" if first == last else f"layers {first} to {last}"
    return Int8Part(
        module=part,
        input_shape=_shape(entering),
        output_shape=_shape(leaving),
        name=f"model {chain.graph.name}, {what}",
    )


def require_int8(read: ReadModel, module: nn.Module) -> None:
    """Raise `ConfigError` for the first layer that int8 cannot train, or that several tensors enter or leave.

    A device may get any layers, since other devices may leave, so every layer must have int8 kernels.
    """
    if read.model.cuts == Granularity.OPERATIONS:
        raise ConfigError(
            f"pipeline: int8_socs and cuts = {read.model.cuts!r} exclude each other; use cuts = 'layers'"
        )
    for number in range(read.model.num_layers):
        int8_part(module, read.chain, number, number).layers()


def _only(crossing: Sequence[Operation], where: str) -> Operation:
    if len(crossing) != 1:
        raise ConfigError(
            f"pipeline: {len(crossing)} tensors go {where}, and int8_socs allows one; use cuts = 'blocks'"
        )
    (only,) = crossing
    if only.dtype != torch.float32:
        raise ConfigError(f"pipeline: {only.dtype} goes {where}, and int8_socs needs float32")
    return only


def _shape(operation: Operation) -> tuple[int, ...]:
    assert operation.shape is not None
    return operation.shape[1:]
