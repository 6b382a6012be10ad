"""Operators on the FP32 side: torch between int8 tensors, with gradients through autograd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from socflower import _int8
from socflower.errors import TrainingFailed
from socflower.model_graph.model_copy import copied
from socflower.precision.algorithm import OutsideUpdate
from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.bound_graph import Fp32Factory
from socflower.precision.int8.fixed_point import FloatArray, Int8Array, exponent_for, to_real
from socflower.precision.int8.operators import Operator, StepContext, Tensor


def fp32_factory(modules: Mapping[str, nn.Module]) -> Fp32Factory:
    """Return the factory of a program's FP32 operators; they train copies of `modules`."""
    copies = {name: copied(module) for name, module in modules.items()}

    def make(node: ir.Fp32, inputs: Sequence[Tensor], output: Tensor) -> Operator[ir.Fp32]:
        return Fp32Operator(node, copies[node.name], inputs, output)

    return make


class Fp32Operator(Operator[ir.Fp32]):
    """A torch module that reads int8 tensors and writes one: the switch between sides in the placement (F17)."""

    def __init__(
        self, node: ir.Fp32, module: nn.Module, inputs: Sequence[Tensor], output: Tensor
    ) -> None:
        super().__init__(node, inputs, output)
        self._module = module
        self._sources: list[torch.Tensor]
        self._result: torch.Tensor

    def forward(self, step: StepContext) -> None:
        """Run the module on the real values of the inputs, and round its output."""
        training = step.training
        self._load_parameters(step)
        self._module.train(training)
        self._sources = []
        for x in self.inputs:
            source = torch.from_numpy(to_real(x.data, x.exponent, x.shape))
            self._sources.append(source.requires_grad_(training))
        with torch.set_grad_enabled(training):
            self._result = self._module(
                *(
                    source.reshape(len(source), *form)
                    for source, form in zip(self._sources, self.node.forms, strict=True)
                )
            )
        if training and not step.replay and not step.share.is_empty:
            named = self._module.named_buffers()
            buffers = [(name, buffer.detach().clone()) for name, buffer in named]
            step.share.change(lambda: self._store(step, buffers))
        made = self._result.detach()
        output = self.output
        output.exponent = to_int8(self.node.name, step.share, made, output.shape, output.data)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Run autograd from the real gradient, round the inputs' gradients, and update the parameters by plain SGD.

        Under an outside update the gradients of the parameters are stored for the trainer, which updates them.
        """
        real = to_real(self.gradient, self.output.gradient_exponent, self.output.shape)
        parameters = self._module.named_parameters()
        trained = {name: part for name, part in parameters if part.requires_grad}
        needed = [index for index, target in enumerate(into) if target is not None]
        made = torch.autograd.grad(
            self._result,
            [*trained.values(), *(self._sources[index] for index in needed)],
            torch.from_numpy(real).reshape(self._result.shape),
            materialize_grads=True,
        )
        exponents = [0] * len(self.inputs)
        for index, gradient in zip(needed, made[len(trained) :], strict=True):
            x, target = self.inputs[index], into[index]
            assert target is not None
            exponents[index] = to_int8(self.node.name, step.share, gradient, x.shape, target)
            if x.mask is not None:
                np.multiply(target, x.mask > 0, out=target)
        rate = step.mean_learning_rate
        if isinstance(step.algorithm.update, OutsideUpdate):
            for name, gradient in zip(trained, made, strict=False):
                out = step.parameters.fp32_gradients[f"{self.node.name}.{name}"]
                np.multiply(gradient.numpy(), np.float32(rate), out=out)
            return exponents
        for parameter, gradient in zip(trained.values(), made, strict=False):
            step.share.add(gradient.numpy(), partial(self._descend, parameter, rate))
        # Store each parameter under all its names: one shared within the module has several in a state_dict.
        every = self._module.named_parameters(remove_duplicate=False)
        named = [(name, part) for name, part in every if part.requires_grad]
        step.share.change(lambda: self._store(step, named))
        return exponents

    @staticmethod
    def _descend(parameter: torch.Tensor, rate: float, gradient: FloatArray) -> None:
        with torch.no_grad():
            parameter.sub_(torch.from_numpy(gradient), alpha=rate)

    def _load_parameters(self, step: StepContext) -> None:
        prefix = f"{self.node.name}."
        state = {
            name.removeprefix(prefix): torch.from_numpy(np.array(array))
            for name, array in step.parameters.fp32.items()
            if name.startswith(prefix)
        }
        # Of the names of a shared parameter only the first one is up to date.
        first_names = {id(part): name for name, part in self._module.named_parameters()}
        for name, part in self._module.named_parameters(remove_duplicate=False):
            state[name] = state[first_names[id(part)]]
        # Constants of `forward`, and buffers that are in no state_dict, are state of an island but not of the model.
        self._module.load_state_dict(state, strict=False)

    def _store(self, step: StepContext, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        for part, value in values:
            name = f"{self.node.name}.{part}"
            # A buffer may be left out of the state_dict.
            if name in step.parameters.fp32:
                step.parameters.fp32[name] = value.detach().numpy().copy()


def to_int8(
    name: str, share: BatchShare, real: torch.Tensor, shape: ir.Shape, out: Int8Array
) -> int:
    """Round (batch, c, h, w) values to `out` and return the exponent. Raises TrainingFailed on NaN and infinity."""
    values = np.ascontiguousarray(real.numpy(), dtype=np.float32).reshape(-1, *shape)
    largest = share.most(_int8.max_magnitude(values))
    if not np.isfinite(largest):
        raise TrainingFailed(f"{name}: made a NaN or an infinity in FP32; lower the learning rate")
    exponent = exponent_for(largest)
    scaled = np.rint(values * np.float32(2.0**-exponent))
    rounded = np.clip(scaled, -127, 127).astype(np.int8)
    out[...] = 0
    out[..., : shape[0]] = rounded.transpose(2, 3, 0, 1)
    return exponent
