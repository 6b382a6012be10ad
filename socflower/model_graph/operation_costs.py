"""FLOPs of torch's operations, forward and backward, and the memory that attention keeps.

Multiply and add count as two operations. Only products count: matrix products, convolutions, attention and recurrent
layers; element-wise operations, normalisation and the look-up of embeddings have none.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two operands; the gradient of each operand is another product with as many FLOPs."""

    flops: float
    # Whether the left and the right operand need a gradient.
    left: bool
    right: bool

    @property
    def backward_flops(self) -> float:
        """FLOPs of the gradients that the backward pass computes."""
        return self.flops * (self.left + self.right)


def products_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[Product, ...]:
    """Return the products of a call of an operation below autograd; empty for operations that do not multiply.

    Products that fused kernels repeat in the backward pass do not count.
    """
    packet = func.overloadpacket
    if packet in _FUSED:
        return _FUSED[packet](*args)
    if packet not in flop_registry:
        return ()
    left, right = args[1:3] if packet in _WITH_SUMMAND else args[:2]
    flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
    return (Product(flops, left.requires_grad, right.requires_grad),)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[Product, ...]:
    """Scores of every query and key, and the sums of values weighted by them; all (batch, heads, length, width)."""
    num_scores = math.prod(query.shape[:-1]) * key.shape[-2]
    scores_need = query.requires_grad or key.requires_grad
    return (
        Product(2.0 * num_scores * query.shape[-1], query.requires_grad, key.requires_grad),
        Product(2.0 * num_scores * value.shape[-1], scores_need, value.requires_grad),
    )


def _recurrent(
    steps: torch.Tensor, of_input: torch.Tensor, of_hidden: torch.Tensor, *_: Any
) -> tuple[Product, ...]:
    """One layer in one direction: `steps` (length, batch, inputs), weights (gates x hidden, inputs or hidden)."""
    num_rows = math.prod(steps.shape[:-1])
    hidden_needs = any(tensor.requires_grad for tensor in (steps, of_input, of_hidden))
    return (
        Product(2.0 * num_rows * of_input.numel(), steps.requires_grad, of_input.requires_grad),
        Product(2.0 * num_rows * of_hidden.numel(), hidden_needs, of_hidden.requires_grad),
    )


_LOG_SUM_BYTES = 4

_WITH_SUMMAND = frozenset((_aten.addmm, _aten.baddbmm))

# Kernels of the CPU, since profiles run there or on the meta device.
_FUSED: Mapping[Any, Callable[..., tuple[Product, ...]]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten.mkldnn_rnn_layer: _recurrent,
}


class AttentionAsFused(TorchFunctionMode):
    """Counts for `scaled_dot_product_attention` the memory that its fused kernels keep.

    On the meta device torch takes the path that makes all scores. The kernels that train make the output and one
    log-sum for each query and head. `within` is a context around the call, and `report` gets the number of bytes.
    """

    def __init__(
        self, within: Callable[[], AbstractContextManager[None]], report: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._within, self._report = within, report
        # This function calls attention by a global name, which no mode sees; so it gets other globals.
        original = functional.multi_head_attention_forward
        replaced = {
            "scaled_dot_product_attention": self._attend,
            "has_torch_function": lambda _: False,
        }
        code, its_globals = original.__code__, {**original.__globals__, **replaced}
        self._multi_head = FunctionType(code, its_globals, original.__name__, original.__defaults__)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            func = self._attend
        elif func is functional.multi_head_attention_forward:
            func = self._multi_head
        return func(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._within():
            output: torch.Tensor = functional.scaled_dot_product_attention(*args, **kwargs)
            if output.is_meta and output.ndim == 4:
                # The kernels store the heads of a token next to each other, for the projection.
                output = output.transpose(1, 2).contiguous().transpose(1, 2)
        log_sum_bytes = math.prod(output.shape[:-1]) * _LOG_SUM_BYTES
        self._report(output.numel() * output.element_size() + log_sum_bytes)
        return output
