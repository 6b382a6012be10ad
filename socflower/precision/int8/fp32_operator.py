"""Operators on the FP32 side: torch between two int8 tensors, with gradients through autograd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from socflower import _int8
from socflower.errors import ConfigError, TrainingFailed
from socflower.model_graph.model_copy import copied
from socflower.precision.algorithm import Fp32Update, OutsideUpdate
from socflower.precision.int8 import network as ir
from socflower.precision.int8.batch_share import BatchShare
from socflower.precision.int8.bound_graph import Fp32Factory
from socflower.precision.int8.fixed_point import FloatArray, Int8Array, exponent_for, to_real
from socflower.precision.int8.operators import Operator, StepContext, Tensor, image_scales
from socflower.precision.int8.updates import descend


class _Factory:
    """Makes the FP32 operators of a program, with modules by the names of their nodes."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def __call__(
        self, node: ir.Fp32, inputs: Sequence[Tensor], output: Tensor
    ) -> Operator[ir.Fp32]:
        return Fp32Operator(node, self._modules[node.name], inputs, output)


def fp32_factory(modules: Mapping[str, nn.Module]) -> Fp32Factory:
    """Return the factory of a program's FP32 operators; they train copies of `modules`."""
    return _Factory({name: copied(module) for name, module in modules.items()})


def fp32_modules(nodes: Sequence[ir.Fp32], module: nn.Module) -> Fp32Factory:
    """Return the factory of operators that were saved, with copies of the modules that `module` has at their paths.

    Raises ConfigError if it does not have them, or has others there.
    """
    found = dict(module.named_modules())
    modules = {}
    for node in nodes:
        own = found.get(node.path)
        if own is None or type(own).__name__ != node.operator:
            has = "nothing" if own is None else type(own).__name__
            raise ConfigError(
                f"load: module has {has} at {node.path!r}, and the file needs {node.operator}"
            )
        modules[node.name] = own
    return fp32_factory(modules)


class Fp32Operator(Operator[ir.Fp32]):
    """A torch module that reads and writes int8 tensors: the switch between sides in the placement (F17)."""

    def __init__(
        self, node: ir.Fp32, module: nn.Module, inputs: Sequence[Tensor], output: Tensor
    ) -> None:
        super().__init__(node, inputs, output)
        self._module = module
        self._source: torch.Tensor
        self._result: torch.Tensor

    def forward(self, step: StepContext) -> None:
        """Run the module on the real values of the input, and round its output."""
        x = self.inputs[0]
        self._load_parameters(step)
        self._module.train()
        self._source = torch.from_numpy(x.real())
        self._source.requires_grad_()
        with torch.enable_grad():
            self._result = self._module(self._source.flatten(1) if self.node.flat else self._source)
        if not step.replay and not step.share.is_empty:
            named = self._module.named_buffers()
            buffers = [(name, buffer.detach().clone()) for name, buffer in named]
            step.share.change(lambda: self._store(step, buffers))
        made = self._result.detach()
        output = self.output
        output.factor = 1.0
        output.exponent = to_int8(self.node.name, step.share, made, output.shape, output.data)

    def evaluate(self, step: StepContext) -> None:
        """Run the module in evaluation mode, and round each image of its output."""
        self._load_parameters(step)
        self._module.eval()
        source = torch.from_numpy(self.inputs[0].evaluated())
        with torch.no_grad():
            made = self._module(source.flatten(1) if self.node.flat else source)
        output = self.output
        values = np.asarray(made.numpy(), dtype=np.float32).reshape(-1, *output.shape)
        largest = np.abs(values).max(axis=(1, 2, 3))
        output.by_image, inverse = image_scales(self.node.name, largest)
        write_int8(values * inverse[:, None, None, None], output.data)
        if output.is_result:
            output.exact = values.transpose(2, 3, 0, 1)

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Run autograd from the real gradient, round the input's gradient, and update the parameters by SGD.

        Under an outside update the gradients of the parameters are stored for the trainer, which updates them.
        """
        real = to_real(self.gradient, self.output.gradient_exponent, self.output.shape)
        x = self.inputs[0]
        target = into[0]
        parameters = self._module.named_parameters()
        trained = {name: part for name, part in parameters if part.requires_grad}
        made = torch.autograd.grad(
            self._result,
            [*trained.values(), *([] if target is None else [self._source])],
            torch.from_numpy(real).reshape(self._result.shape),
            materialize_grads=True,
        )
        exponent = 0
        if target is not None:
            exponent = to_int8(self.node.name, step.share, made[-1], x.shape, target)
            if x.mask is not None:
                np.multiply(target, x.mask > 0, out=target)
        if isinstance(step.algorithm.update, OutsideUpdate):
            for name, gradient in zip(trained, made, strict=False):
                out = step.parameters.fp32_gradients[f"{self.node.name}.{name}"]
                np.multiply(gradient.numpy(), np.float32(step.rate.of_sum), out=out)
            return [exponent]
        for (name, parameter), gradient in zip(trained.items(), made, strict=False):
            update = partial(self._descend, step, name, parameter)
            step.share.add(gradient.numpy(), update)
        # Store each parameter under all its names: one shared within the module has several in a state_dict.
        every = self._module.named_parameters(remove_duplicate=False)
        named = [(name, part) for name, part in every if part.requires_grad]
        step.share.change(lambda: self._store(step, named))
        return [exponent]

    def _descend(
        self, step: StepContext, part: str, parameter: torch.Tensor, gradient: FloatArray
    ) -> None:
        name = f"{self.node.name}.{part}"
        rule = step.algorithm.update
        sgd = rule if isinstance(rule, Fp32Update) else Fp32Update()
        velocities = step.parameters.fp32_velocities
        values = parameter.detach().numpy()
        velocity = descend(values, velocities.get(name), np.array(gradient), step.rate, sgd)
        if velocity is not None:
            velocities[name] = velocity

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
        self._module.load_state_dict(state)

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
    write_int8(values * np.float32(2.0**-exponent), out)
    return exponent


def write_int8(scaled: FloatArray, out: Int8Array) -> None:
    """Write the nearest int8 of (batch, c, h, w) values."""
    rounded = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    out[...] = 0
    out[..., : rounded.shape[1]] = rounded.transpose(2, 3, 0, 1)
