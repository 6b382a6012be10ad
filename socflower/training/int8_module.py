"""A torch module whose passes are computed in int8: `int8_`, for any loss, optimiser and training loop."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from socflower.errors import ConfigError, require_known
from socflower.model_graph.graph import refused_samples
from socflower.model_graph.model_copy import copied
from socflower.model_graph.random_state import forked_generator
from socflower.plain_numbers import plain_numbers
from socflower.precision import EngineSettings, RescalingPolicy
from socflower.precision.int8.network import UnsupportedOperator
from socflower.training.batch_statistics import require_batch_statistics
from socflower.training.int8_inputs import PREFIX, SequenceReader, engine_inputs, is_tokens
from socflower.training.int8_layers import Int8Layers
from socflower.training.trainer import require_cpu

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_NAME = "int8_"


@plain_numbers
def int8_(
    module: ModuleT,
    *,
    fp32_operators: Sequence[str] = (),
    unsupported: Literal["refuse", "fp32"] = "fp32",
    num_threads: int = 1,
    kernel: str = "",
) -> ModuleT:
    """Compute the forward and backward passes of a module in int8 from now on; the module is changed and returned.

    Its parameters stay FP32 tensors, the masters, which each training pass rounds to int8. So `loss.backward()`, any
    loss, optimiser and schedule of torch, `state_dict`, `deepcopy` and pickle work as before, and a training that
    resumes from a `state_dict` has the same bits. The module takes one float32 tensor, (n, channels, height, width),
    (n, features) or (n, length, features), or int64 tokens (n, length); it may be a part of a larger model. Keyword
    arguments may only be None or False. Frozen parameters get no gradient.

    `fp32_operators` are the paths of modules inside it that run in torch FP32. Operators without an int8 kernel run in
    FP32 too, which a warning names; with `unsupported` "refuse" they raise ConfigError when the module is called.
    `num_threads` and `kernel` are those of `EngineSettings`; they change no result.

    Tensors that int8 does not have raise ConfigError when the module is called. If the inputs need no gradient,
    `backward` raises TrainingFailed once no gradient has reached the weights for long, since the loss cannot change.
    """
    require_known("int8_: unsupported", unsupported, ("refuse", "fp32"))
    settings = EngineSettings(
        num_threads=num_threads,
        kernel=kernel,
        # Remembered exponents would be state that no state_dict has.
        rescaling=RescalingPolicy(adaptive=False),
    )
    # An attribute of the instance: type, parameters and submodules of the module stay as they are.
    module.__dict__["forward"] = Int8Forward(module, settings, fp32_operators, unsupported)
    return module


class Int8Forward:
    """The `forward` of a module after `int8_`; it is copied and pickled with the module.

    It has an engine for each shape of the inputs, and builds it when that shape is first seen. As many results as the
    caller likes may wait for their backward passes; each holds the memory of its activations.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: EngineSettings,
        fp32_operators: Sequence[str],
        unsupported: Literal["refuse", "fp32"],
    ) -> None:
        self._module = module
        self._settings = settings
        self._fp32_operators = tuple(fp32_operators)
        self._unsupported: Literal["refuse", "fp32"] = unsupported
        self._engines: dict[Any, _Engine] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without engines, which are built again: all that they know follows from the module."""
        return {**vars(self), "_engines": {}}

    def __call__(self, inputs: Tensor, **options: Any) -> Tensor:
        """Return the module's result, computed in int8."""
        module = self._module
        _require_left_out(module, options)
        _require_float32(module, inputs)
        require_batch_statistics(module, _NAME)
        engine = self._engine(inputs)
        engine.load()
        given = engine_inputs(inputs)
        return engine.train(given) if module.training else engine.evaluate(given)

    def _engine(self, inputs: Tensor) -> "_Engine":
        """Return the engine for inputs of this shape and the parameters that train now."""
        parameters = self._module.named_parameters()
        frozen = tuple(name for name, part in parameters if not part.requires_grad)
        key = (inputs.shape[1:], is_tokens(inputs), inputs.requires_grad, frozen)
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = self._built(inputs)
        return engine

    def _built(self, inputs: Tensor) -> "_Engine":
        plain = _without_int8(self._module)
        is_sequence = inputs.ndim == 3
        prefix = PREFIX if is_sequence else ""
        try:
            layers = Int8Layers(
                SequenceReader(plain) if is_sequence else plain,
                engine_inputs(inputs).shape[1:],
                _output_shape(plain, inputs),
                settings=self._settings,
                fp32_operators=[prefix + name for name in self._fp32_operators],
                unsupported=self._unsupported,
                input_gradient=inputs.requires_grad,
                # Layers before it may belong to a network with other branches.
                trains_alone=not inputs.requires_grad,
            )
        except UnsupportedOperator as error:
            raise error.advising("int8_(module, {})") from None
        return _Engine(self._module, layers, prefix)


class _Engine:
    """Int8 layers with the module whose parameters and statistics they take; their names of these have a prefix."""

    def __init__(self, module: nn.Module, layers: Int8Layers, prefix: str) -> None:
        self._module = module
        self._layers = layers
        self._prefix = prefix
        self._free = [0]
        self._loaded: tuple[tuple[int, int], ...] = ()
        self.num_loads = 0

    def load(self) -> None:
        """Round the module's parameters, and take its running statistics, if they have changed."""
        versions = self._versions()
        if versions == self._loaded:
            return
        # If loading fails, some values are new and some are old.
        self._loaded = ()
        self.num_loads += 1
        self._layers.round_masters(self._buffers(), None)
        self._loaded = versions

    def train(self, inputs: Tensor) -> Tensor:
        """Return the result of a training pass, differentiable; update the running statistics."""
        number = self._free.pop() if self._free else self._layers.add_pass()
        draws = self._layers.engine.graph.draws
        draw = int(torch.randint(2**62, ())) if draws else 0
        result = self._layers.forward(inputs, draw, number=number, lease=_Lease(self, number))
        buffers = self._buffers()
        statistics = self._layers.statistics()
        for name, value in statistics.items():
            buffers[name].copy_(value)
        for name, buffer in buffers.items():
            if name.endswith("num_batches_tracked") and name not in statistics:
                buffer += 1
        # The engine has these statistics already.
        self._loaded = self._versions()
        return result

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Return the result of a pass in evaluation mode; its backward pass is refused."""
        result = self._layers.evaluate(inputs)
        if not torch.is_grad_enabled():
            return result
        return cast(Tensor, _NoBackward.apply(result, *self._module.parameters()))

    def _buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by the layers' names."""
        return {self._prefix + name: buffer for name, buffer in self._module.named_buffers()}

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """Return what changes with every change of a parameter or buffer."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return tuple((id(tensor), tensor._version) for tensor in tensors)

    def free(self, number: int) -> None:
        """Return an engine whose result can no longer get a backward pass."""
        self._free.append(number)


class _Lease:
    """One of an engine's passes; see `int8_layers.Lease`."""

    def __init__(self, engine: _Engine, number: int) -> None:
        self._engine = engine
        self._number = number
        self._num_loads = engine.num_loads

    def check(self) -> None:
        """Raise `ConfigError` if the weights of the forward pass are gone."""
        if self._engine.num_loads != self._num_loads:
            raise ConfigError(
                "int8_: parameters have changed between the forward pass and its backward pass; call backward "
                "before optimizer.step"
            )

    def __del__(self) -> None:
        self._engine.free(self._number)


class _NoBackward(torch.autograd.Function):
    """A result of evaluation: as in torch it depends on the parameters, but int8 has no gradient of it."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *parameters: Tensor) -> Tensor:
        """Return the result."""
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise `ConfigError`."""
        raise ConfigError(
            "int8_: backward of a pass in evaluation mode; call module.train() before the forward pass"
        )


def _without_int8(module: nn.Module) -> nn.Module:
    """Return a module with the same parameters, buffers and submodules, that computes as before `int8_`."""
    plain = object.__new__(type(module))
    plain.__dict__.update(vars(module))
    del plain.__dict__["forward"]
    return plain


def _require_left_out(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a keyword argument that asks for something, such as an attention mask."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"int8_: {type(module).__name__} was called with {name}, and int8 has one input; leave it out, or "
                "call int8_ on a part that does not need it"
            )


def _require_float32(module: nn.Module, inputs: Tensor) -> None:
    """Raise `ConfigError` for inputs and parameters that are not float32 on the CPU."""
    named = [("inputs", inputs), *module.named_parameters()]
    for name, tensor in named:
        if tensor is inputs and isinstance(tensor, Tensor) and is_tokens(tensor):
            require_cpu(str(tensor.device), f"int8_: {name}")
            continue
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"int8_: the module takes one float32 tensor, got {type(tensor).__name__}"
            )
        require_cpu(str(tensor.device), f"int8_: {name}")
        if tensor.dtype != torch.float32:
            remedy = "pass inputs.float()" if name == "inputs" else "call module.float() before"
            raise ConfigError(
                f"int8_: {name} has {tensor.dtype}, and int8 training rounds float32; {remedy}"
            )


def _output_shape(plain: nn.Module, inputs: Tensor) -> tuple[int, ...]:
    """Return the shape of the result for one sample."""
    name = type(plain).__name__
    example = inputs[:1].detach()
    own = copied(plain, name).eval()
    with torch.no_grad(), forked_generator():
        try:
            return tuple(own(example).shape[1:])
        except Exception as error:
            # Layers raise various types for a wrong shape.
            raise refused_samples(name, example, error) from error
