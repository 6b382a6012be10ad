"""Modules that torch.fx cannot follow, such as those of `transformers`, as a graph that it can: by torch.export.

The graph keeps the module's own parameters and buffers under their names. What torch.export fixes for good is free
again: dropout follows `train()` and `eval()`, and the batch has any size.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.nn import functional

from socflower.errors import ConfigError
from socflower.model_graph.model_copy import reason
from socflower.plain_numbers import plain_numbers

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_DROPOUT = torch.ops.aten.dropout.default
_SIZE = torch.ops.aten.sym_size.int
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_MOVES = (torch.ops.aten.to.device, torch.ops.aten.to.dtype_layout)
_FACTORIES = {
    torch.ops.aten.arange.default: torch.arange,
    torch.ops.aten.arange.start: torch.arange,
    torch.ops.aten.zeros.default: torch.zeros,
    torch.ops.aten.ones.default: torch.ones,
    torch.ops.aten.full.default: torch.full,
    torch.ops.aten.scalar_tensor.default: torch.scalar_tensor,
}
_WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@plain_numbers
def exported_module(
    model: nn.Module, example: Tensor, *, free: Mapping[int, int] | None = None
) -> fx.GraphModule:
    """Return a module that computes what a model does and that torch.fx can follow, so that it can be cut.

    `example` is a batch of at least two samples. `free` has, by dimension after the first, the greatest length of
    batches, as in `{1: 512}` for sequences of any length to 512; other dimensions have the example's. Parameters and
    buffers are the model's own tensors, under its names. The model takes one tensor and returns one: wrap one that
    takes more, and compute masks inside. Raises `ConfigError` if torch.export cannot follow it, naming what prevents
    that, and for BatchNorm, whose statistics such a graph does not keep. The module computes on the CPU.
    """
    norms = [
        name or type(part).__name__
        for name, part in model.named_modules()
        if isinstance(part, _WITH_STATISTICS)
    ]
    if norms:
        raise ConfigError(
            f"exported_module: {norms[0]} keeps statistics of batches; torch.fx follows such networks itself"
        )
    if not isinstance(example, Tensor) or len(example) < 2:
        raise ConfigError("exported_module: the example must be a tensor of two samples or more")
    lengths = {0: Dim("samples", min=1, max=2**20)}
    lengths |= {at: Dim(f"length_{at}", min=2, max=most) for at, most in (free or {}).items()}
    was_training = model.training
    try:
        program = export(model.train(), (example,), dynamic_shapes=(lengths,), strict=False)
    except Exception as error:
        # Each part of torch.export raises types of its own.
        raise ConfigError(
            f"exported_module: torch.export cannot follow {type(model).__name__}: {reason(error)}"
        ) from None
    finally:
        model.train(was_training)
    graph = program.module(check_guards=False)
    _return_one_tensor(graph.graph, type(model).__name__)
    attributes = _attributes(model, graph)
    _shorten_sizes(graph.graph)
    _forget_devices(graph.graph)
    modules = _free_dropout(graph)
    _drop_assertions(graph.graph)
    made = fx.GraphModule({**attributes, **modules}, graph.graph, type(model).__name__)
    made.graph.set_codegen(fx.graph.CodeGen())
    made.recompile()
    return made.train(was_training)


def _return_one_tensor(graph: fx.Graph, name: str) -> None:
    """Make the graph return its tensor itself; `ConfigError` if there are several, or none."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    results = output.args[0]
    if isinstance(results, Sequence) and len(results) == 1 and isinstance(results[0], fx.Node):
        output.args = (results[0],)
    elif not isinstance(results, fx.Node):
        raise ConfigError(
            f"exported_module: {name} returns {len(results)} values; return one tensor"
        )


def _attributes(model: nn.Module, graph: fx.GraphModule) -> dict[str, Any]:
    """Return what the graph reads by name: the model's tensors, and constants that torch.export has made."""
    own: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    read = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    return {name: own[name] if name in own else operator.attrgetter(name)(graph) for name in read}


def _shorten_sizes(graph: fx.Graph) -> None:
    """Read each size that an operation needs from a tensor that it reads anyway.

    Else one number of the input would cross every cut.
    """
    for node in [node for node in graph.nodes if node.target is _SIZE]:
        size = node.meta["val"]
        for user in list(node.users):
            found = _place_of(size, user)
            if found is None:
                _leave_to_torch(node, user)
                continue
            if found == tuple(node.args):
                continue
            with graph.inserting_before(user):
                own = graph.call_function(_SIZE, found)
                own.meta["val"] = size
            user.replace_input_with(node, own)
        if not node.users:
            graph.erase_node(node)


def _leave_to_torch(size: fx.Node, user: fx.Node) -> None:
    """Write a size that a reshape gives as -1, if no other one is."""
    if user.target in _RESHAPES:
        lengths = list(cast(Sequence[Any], user.args[1]))
        if -1 not in lengths and lengths.count(size) == 1:
            user.args = (user.args[0], [-1 if each is size else each for each in lengths])


def _place_of(size: Any, user: fx.Node) -> tuple[fx.Node, int] | None:
    """Return a tensor that an operation reads, and its dimension of a size, if there is one."""
    for given in user.all_input_nodes:
        value = given.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        for at, length in enumerate(value.shape):
            # Lengths of the example are plain numbers, others are symbols.
            if isinstance(length, torch.SymInt) and str(length) == str(size):
                return given, at
    return None


def _forget_devices(graph: fx.Graph) -> None:
    """Let constants be made on torch's default device, and leave tensors where they are.

    Costs are counted on tensors without values, which have a device of their own.
    """
    for node in graph.nodes:
        if node.target in _FACTORIES:
            node.target = _FACTORIES[node.target]
            kept = {key: value for key, value in node.kwargs.items() if key == "dtype"}
            node.kwargs = kept
        elif node.target in _MOVES:
            at = node.args[2] if len(node.args) > 2 else node.kwargs.get("dtype")
            node.target, node.kwargs = torch.ops.aten.to.dtype, {}
            node.args = (node.args[0], at)


def _free_dropout(exported: fx.GraphModule) -> dict[str, nn.Module]:
    """Put modules, which follow train() and eval(), in the place of dropout with a fixed setting; return them."""
    modules: dict[str, nn.Module] = {}
    graph = exported.graph
    for node in list(graph.nodes):
        if node.target is _DROPOUT:
            name = f"dropout_{len(modules)}"
            modules[name] = nn.Dropout(float(node.args[1]))
            arguments: tuple[Any, ...] = (node.args[0],)
        elif node.target is _ATTENTION and len(node.args) > 4 and node.args[4]:
            name = f"attention_{len(modules)}"
            modules[name] = _Attention(node.args[3:], node.kwargs)
            arguments = node.args[:3]
            if isinstance(node.args[3], fx.Node):
                arguments = node.args[:4]
        else:
            continue
        exported.add_submodule(name, modules[name])
        with graph.inserting_before(node):
            made = graph.call_module(name, arguments)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return modules


class _Attention(nn.Module):
    """Scaled dot-product attention with dropout in training mode."""

    def __init__(self, settings: Sequence[Any], options: Mapping[str, Any]) -> None:
        super().__init__()
        self.dropout, self.is_causal = float(settings[1]), bool([*settings, False, False][2])
        self.scale = options.get("scale")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend; shapes (n, heads, length, width)."""
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
            scale=self.scale,
        )


def _drop_assertions(graph: fx.Graph) -> None:
    """Erase checks of shapes, and what only they read."""
    for node in reversed(list(graph.nodes)):
        name = str(node.target)
        if node.op != "placeholder" and ("assert" in name or "guards" in name):
            graph.erase_node(node)
    graph.eliminate_dead_code()
