"""Operators on the FP32 side: torch between int8 tensors, with gradients through autograd."""

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
from socflower.precision.int8.operators.base import Operator, StepContext, Tensor, image_scales
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


def fp32_modules(graph: ir.Graph, module: nn.Module) -> Fp32Factory:
    """Return the factory of operators that were saved, with copies of the modules that `module` has at their paths.

    Operators of several modules or of functions have no path: `module` is captured again for them. Raises ConfigError
    if it does not have them, or has others there.
    """
    nodes = [node for node in graph.nodes if isinstance(node, ir.Fp32)]
    found = dict(module.named_modules())
    modules = {}
    for node in nodes:
        if not node.path:
            continue
        own = found.get(node.path)
        if own is None or type(own).__name__ != node.operator:
            has = "nothing" if own is None else type(own).__name__
            raise ConfigError(
                f"load: module has {has} at {node.path!r}, and the file needs {node.operator}"
            )
        modules[node.name] = own
    without_path = [node for node in nodes if not node.path]
    if without_path:
        modules |= _captured_again(graph, without_path, sorted(modules), module)
    return fp32_factory(modules)


def _captured_again(
    graph: ir.Graph, nodes: Sequence[ir.Fp32], paths: Sequence[str], module: nn.Module
) -> dict[str, nn.Module]:
    """Return the modules of operators without a path; those at `paths` run in FP32 as well."""
    from socflower.precision.int8.from_torch import capture_network

    channels, *size = graph.input_shape
    shape = (channels,) if size == [1, 1] else graph.input_shape
    called = [path for path in paths if path in dict(module.named_modules())]
    captured = capture_network(module, shape, fp32_operators=called, unsupported="fp32")
    made = {node.name: node for node in captured.graph.nodes}
    for node in nodes:
        own = made.get(node.name)
        is_same = isinstance(own, ir.Fp32) and (own.operator, own.forms) == (
            node.operator,
            node.forms,
        )
        if not is_same:
            raise ConfigError(
                f"load: the file needs {node.operator} in FP32 as {node.name}, which module does not have"
            )
    return {node.name: captured.modules[node.name] for node in nodes}


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
        self._load_parameters(step)
        self._module.train()
        self._sources = [torch.from_numpy(x.real()).requires_grad_() for x in self.inputs]
        with torch.enable_grad():
            self._result = self._run(self._sources)
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
        with torch.no_grad():
            made = self._run([torch.from_numpy(x.evaluated()) for x in self.inputs])
        output = self.output
        values = np.asarray(made.numpy(), dtype=np.float32).reshape(-1, *output.shape)
        largest = np.abs(values).max(axis=(1, 2, 3))
        output.by_image, inverse = image_scales(self.node.name, largest)
        write_int8(values * inverse[:, None, None, None], output.data)
        if output.is_result:
            output.exact = values.transpose(2, 3, 0, 1)

    def _run(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the module's output for (batch, c, h, w) inputs, each in the form that the module takes."""
        read = zip(sources, self.node.forms, strict=True)
        made: torch.Tensor = self._module(
            *(source.reshape(len(source), *form) for source, form in read)
        )
        return made

    def backward(self, step: StepContext, into: Sequence[Int8Array | None]) -> Sequence[int]:
        """Run autograd from the real gradient, round the inputs' gradients, and update the parameters by SGD.

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
        if isinstance(step.algorithm.update, OutsideUpdate):
            for name, gradient in zip(trained, made, strict=False):
                out = step.parameters.fp32_gradients[f"{self.node.name}.{name}"]
                np.multiply(gradient.numpy(), np.float32(step.rate.of_sum), out=out)
            return exponents
        for (name, parameter), gradient in zip(trained.items(), made, strict=False):
            update = partial(self._descend, step, name, parameter)
            step.share.add(gradient.numpy(), update)
        # Store each parameter under all its names: one shared within the module has several in a state_dict.
        every = self._module.named_parameters(remove_duplicate=False)
        named = [(name, part) for name, part in every if part.requires_grad]
        step.share.change(lambda: self._store(step, named))
        return exponents

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
    write_int8(values * np.float32(2.0**-exponent), out)
    return exponent


def write_int8(scaled: FloatArray, out: Int8Array) -> None:
    """Write the nearest int8 of (batch, c, h, w) values."""
    rounded = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    out[...] = 0
    out[..., : rounded.shape[1]] = rounded.transpose(2, 3, 0, 1)
