"""A torch model as the layers that a pipeline is planned with, and as the modules that its stages run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor, nn

from socflower.cluster.cost_model import BACKWARD_TO_FORWARD, LayerProfile
from socflower.errors import ConfigError
from socflower.model_graph.chain import ModelChain, Piece, capture_chain, result_bytes
from socflower.model_graph.exported_module import FREE
from socflower.model_graph.graph import Example, Operation
from socflower.model_graph.layer_profile import profile_operations
from socflower.model_graph.tensor_arrays import tensor_bytes
from socflower.pipeline.plan import SynchronisedPart
from socflower.pipeline.problem import PipelineModel, Tie
from socflower.training.trainer import require_trained_parameters


class Granularity(StrEnum):
    """The places where a model may be cut."""

    # Behind every operation.
    OPERATIONS = "operations"
    # Between two operations that multiply, at the place that the fewest bytes cross.
    LAYERS = "layers"
    # The cuts of `LAYERS` that a single tensor crosses, so none inside residual blocks.
    BLOCKS = "blocks"


@dataclass(frozen=True, kw_only=True)
class ReadModel:
    """A model by layers, and the pieces of its graph, one for each layer."""

    model: PipelineModel
    chain: ModelChain
    # Other names of shared parameters, with those that layers, stages and states use.
    aliases: Mapping[str, str] = field(default_factory=dict)

    def named(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of some layers as a module, each by one name on all devices."""
        return {self.aliases.get(key, key): own for key, own in module.named_parameters()}

    def with_aliases(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights by all names that the model's state dict has."""
        return {
            **weights,
            **{key: weights[one] for key, one in self.aliases.items() if one in weights},
        }

    def part_names(self, part: SynchronisedPart) -> frozenset[str]:
        """Return the names of the parameters and buffers of a synchronised part."""
        if part.tie is not None:
            return frozenset(part.tie.names)
        apart = (name for tie in part.apart for name in tie.names)
        return self.tensor_names(part.first_layer, part.last_layer).difference(apart)

    def tensor_names(self, first: int, last: int) -> frozenset[str]:
        """Return the names of the parameters and buffers of layers `first` to `last`."""
        found = frozenset[str]()
        for piece in self.chain.pieces[first : last + 1]:
            for operation in piece.operations:
                found |= operation.tensors
        return found

    def stage(self, module: nn.Module, first: int, last: int) -> nn.Module:
        """Return layers `first` to `last` of `module`, which share its weights; see `ModelChain.module`."""
        return self.chain.module(module, first, last)


def read_model(
    module: nn.Module,
    example: Example,
    name: str,
    *,
    granularity: Granularity = Granularity.LAYERS,
    label_bytes: float = 8.0,
) -> ReadModel:
    """Return the layers of a model with their costs per sample; nothing is computed with values.

    `example` is a batch, whose first sample is used, or the shape of one float32 sample; several inputs are a tuple or
    a dict. A layer is a piece of the model's chain. FLOPs, weights and activations are those of `profile_module`; a
    layer keeps the results of its operations from its forward to its backward pass. `label_bytes` are of one sample, by
    default of a class as int64.

    Raises `ConfigError` for a model without trained parameters, that torch.fx cannot follow, that fails for the example
    or that cannot be cut.
    """
    require_trained_parameters(module)
    fine = capture_chain(module, example, name=name)
    costs = profile_operations(module, fine.graph, example)
    chain = _coarsened(module, fine, costs, granularity)
    if len(chain.pieces) < 2:
        raise ConfigError(
            f"model {name}: cannot be cut into {granularity.value}, since only one of them multiplies"
        )
    names = _unique(chain.names)
    layers = tuple(
        _layer(module, chain, piece, name, costs)
        for piece, name in zip(chain.pieces, names, strict=True)
    )
    inputs = chain.graph.inputs
    return ReadModel(
        chain=chain,
        aliases=_aliases(module),
        model=PipelineModel(
            name=name,
            layers=layers,
            input_bytes=result_bytes(inputs),
            label_bytes=label_bytes,
            cuts=granularity.value,
            sample_shape=(inputs[0].shape or ())[1:] if len(inputs) == 1 else (),
            sample_type=str(inputs[0].dtype).removeprefix("torch."),
            ties=_ties(module, chain),
            free_lengths=bool(getattr(module, "meta", {}).get(FREE)),
        ),
    )


def _aliases(module: nn.Module) -> dict[str, str]:
    """Return the other names of parameters with several."""
    first = {id(own): key for key, own in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {key: first[id(own)] for key, own in every if key != first[id(own)]}


def _ties(module: nn.Module, chain: ModelChain) -> tuple[Tie, ...]:
    """Return the parameters that several layers use, by these layers."""
    weights = dict(module.named_parameters())
    users: dict[str, list[int]] = {}
    for number, piece in enumerate(chain.pieces):
        for name in {key for operation in piece.operations for key in operation.tensors}:
            users.setdefault(name, []).append(number)
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(users.keys() & weights.keys()):
        if len(users[name]) > 1:
            names_of.setdefault(tuple(users[name]), []).append(name)
    ties = []
    for layers, names in names_of.items():
        own = [weights[name] for name in names]
        trained = tensor_bytes([weight for weight in own if weight.requires_grad])
        ties.append(
            Tie(
                layers=layers,
                names=tuple(names),
                weight_bytes=float(trained),
                frozen_bytes=float(tensor_bytes(own) - trained),
            )
        )
    return tuple(ties)


def _coarsened(
    module: nn.Module,
    fine: ModelChain,
    costs: Mapping[Operation, LayerProfile],
    granularity: Granularity,
) -> ModelChain:
    if granularity is Granularity.OPERATIONS:
        return fine
    tables = {id(table.weight) for table in module.modules() if isinstance(table, nn.Embedding)}
    names = {key for key, weight in module.named_parameters() if id(weight) in tables}

    def begins_layer(operation: Operation) -> bool:
        looks_up = not operation.is_constant and not names.isdisjoint(operation.tensors)
        return costs[operation].forward_flops > 0 or looks_up

    layers = fine.coarsened(begins_layer)
    if granularity is Granularity.LAYERS:
        return layers
    crossed = [len(piece.leaving) for piece in layers.pieces]
    return layers.merged([number for number, tensors in enumerate(crossed) if tensors == 1])


def _layer(
    module: nn.Module,
    chain: ModelChain,
    piece: Piece,
    name: str,
    costs: Mapping[Operation, LayerProfile],
) -> LayerProfile:
    own = [costs[operation] for operation in piece.operations]
    used = {name for operation in piece.operations for name in operation.tensors}
    weights = [weight for key, weight in module.named_parameters() if key in used]
    trained = [weight for weight in weights if weight.requires_grad]
    forward_flops = sum(cost.forward_flops for cost in own)
    backward_flops = sum(cost.backward_flops for cost in own)
    in_backward = any(cost.in_backward for cost in own)
    results = [cost.output_bytes for cost in own if cost.in_backward or not in_backward]
    return LayerProfile(
        name=name,
        forward_flops=forward_flops,
        backward_to_forward=backward_flops / forward_flops
        if forward_flops
        else BACKWARD_TO_FORWARD,
        weight_bytes=float(tensor_bytes(trained)),
        frozen_bytes=float(tensor_bytes(weights) - tensor_bytes(trained)),
        num_tensors=len(trained),
        output_bytes=sum(results),
        in_backward=in_backward,
        crossing_bytes=result_bytes(piece.leaving or chain.graph.results),
        num_operations=sum(cost.output_bytes > 0 for cost in own),
    )


def _unique(names: Sequence[str]) -> list[str]:
    """Return different names; the second call of a layer may be a piece of its own with the same name."""
    return [
        name if names.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(names)
    ]
