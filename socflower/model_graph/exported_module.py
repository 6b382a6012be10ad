"""Modules that torch.fx cannot follow, such as those of `transformers`, as a graph that it can: by torch.export.

The graph keeps the module's own parameters and buffers under their names. What torch.export fixes for good is free
again: dropout follows `train()` and `eval()`, and the batch has any size.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.nn import functional

from socflower.errors import ConfigError
from socflower.model_graph.batch_form import Batch, mapped, num_samples, output_entry, output_of
from socflower.model_graph.model_copy import reason
from socflower.plain_numbers import plain_numbers

EXAMPLE, FREE = "socflower-example", "socflower-free"
"""Entries of an exported module's `meta`: a sample of its example, and whether batches have free lengths."""

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
# They read a tensor for its type only.
_LIKE_FACTORIES = {
    torch.ops.aten.new_zeros.default: torch.zeros,
    torch.ops.aten.new_ones.default: torch.ones,
    torch.ops.aten.new_full.default: torch.full,
}
_MADE = frozenset([*_FACTORIES.values(), *_LIKE_FACTORIES.values()])
_WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@plain_numbers
def exported_module(
    model: nn.Module, example: Batch, *, free: Mapping[int, int] | None = None, output: str = ""
) -> fx.GraphModule:
    """Return a module that computes what a model does and that torch.fx can follow, so that it can be cut.

    `example` is a batch of at least two samples: a tensor, or several in a tuple or a dict, which are positional or
    keyword arguments. `free` has, by dimension after the first, the greatest length of batches, as in `{1: 512}` for
    sequences of any length to 512, of all inputs with that dimension; other dimensions have the example's. Parameters
    and buffers are the model's own tensors, under its names; a shared one has the first of them. The module returns one
    tensor: of a model's several results `output`, by default `logits`. Raises `ConfigError` if torch.export cannot
    follow the model, naming what prevents that, and for BatchNorm, whose statistics such a graph does not keep. The
    module computes on the CPU.
    """
    was_training = model.training
    graph = _exported(model, example, free or {}, output)
    _return_one_tensor(graph.graph, type(model).__name__)
    _name_inputs(graph.graph, example)
    attributes = _attributes(model, graph)
    _forget_devices(graph.graph)
    _compute_in_place(graph.graph)
    _shorten_sizes(graph.graph)
    modules = _free_dropout(graph)
    _drop_assertions(graph.graph)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            node.target = node.meta[_NAME]
    made = fx.GraphModule({**attributes, **modules}, graph.graph, type(model).__name__)
    # The state is the model's own: constants belong to the code.
    for name in attributes.keys() - model.state_dict().keys():
        owner, _, own_name = name.rpartition(".")
        made.get_submodule(owner).register_buffer(own_name, attributes[name], persistent=False)
    made.graph.set_codegen(fx.graph.CodeGen())
    made.recompile()
    # Kept by copies, unlike attributes.
    made.meta[EXAMPLE] = mapped(example, lambda tensor: tensor[:1].detach().clone())
    made.meta[FREE] = bool(free)
    return made.train(was_training)


def _exported(
    model: nn.Module, example: Batch, free: Mapping[int, int], output: str
) -> fx.GraphModule:
    """Return what torch.export makes of a model in training mode."""
    norms = [
        name or type(part).__name__
        for name, part in model.named_modules()
        if isinstance(part, _WITH_STATISTICS)
    ]
    if norms:
        raise ConfigError(
            f"exported_module: {norms[0]} keeps statistics of batches; torch.fx follows such networks itself"
        )
    if num_samples(example) < 2:
        raise ConfigError("exported_module: the example must have two samples or more")
    lengths = {0: Dim("samples", min=1, max=2**20)}
    lengths |= {at: Dim(f"length_{at}", min=2, max=most) for at, most in free.items()}
    shapes = mapped(
        example, lambda tensor: {at: each for at, each in lengths.items() if at < tensor.dim()}
    )
    was_training = model.training
    whole = _OneResult(model.train(), output)
    try:
        program = export(whole, (example,), dynamic_shapes=(shapes,), strict=False)
    except ConfigError:
        raise
    except Exception as error:
        # Each part of torch.export raises types of its own.
        raise ConfigError(
            f"exported_module: torch.export cannot follow {type(model).__name__}: {reason(error)}"
        ) from None
    finally:
        model.train(was_training)
    return cast(fx.GraphModule, program.module(check_guards=False))


# The path of the model inside `_OneResult`.
_PREFIX = "whole."
# The entry of a node's `meta` with the name by which the new module has what the node reads.
_NAME = "socflower-name"


class _OneResult(nn.Module):
    """A model that takes its inputs as one batch and returns one of its results."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.whole, self._output = model, output

    def forward(self, batch: Batch) -> Any:
        """Return the entry `output` of the model's results; by default their `logits`, or what it returns."""
        made = output_of(self.whole, batch)
        found = output_entry(made, self._output or "logits")
        if self._output and found is None:
            raise ConfigError(
                f"exported_module: {type(self.whole).__name__} returns no {self._output!r}"
            )
        return made if found is None else found


def _name_inputs(graph: fx.Graph, example: Batch) -> None:
    """Give inputs the names that a dict's entries have as keyword arguments."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if isinstance(example, Mapping):
        for node, name in zip(inputs, example, strict=True):
            node.target = name


def _return_one_tensor(graph: fx.Graph, name: str) -> None:
    """Make the graph return its tensor itself; `ConfigError` if there are several, or none."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    results = output.args[0]
    if isinstance(results, Sequence) and len(results) == 1 and isinstance(results[0], fx.Node):
        output.args = (results[0],)
    elif not isinstance(results, fx.Node):
        raise ConfigError(
            f"exported_module: {name} returns {len(results)} values; return one tensor, or give output=..."
        )


def _attributes(model: nn.Module, graph: fx.GraphModule) -> dict[str, Any]:
    """Return what the graph reads by name: the model's tensors, and constants that torch.export has made.

    The graph reads them by the model's names then, without that of the module that was exported with it.
    """
    names = {id(own): name for name, own in [*model.named_buffers(), *model.named_parameters()]}
    own: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    found: dict[str, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            inside = str(node.target).removeprefix(_PREFIX)
            if inside in own:
                inside = names[id(own[inside])]
            found[inside] = (
                own[inside] if inside in own else operator.attrgetter(node.target)(graph)
            )
            node.meta[_NAME] = inside
    return found


def _compute_in_place(graph: fx.Graph) -> None:
    """Compute what follows from sizes alone, such as a causal mask, where it is read, from sizes of tensors there.

    Else it would cross every cut, though it is no tensor of samples.
    """
    of_sizes = dict.fromkeys(node for node in graph.nodes if node.target is _SIZE)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.target in _MADE or (inputs and all(each in of_sizes for each in inputs)):
            of_sizes[node] = None
    for node in list(graph.nodes):
        if node in of_sizes:
            continue
        for value in node.all_input_nodes:
            if value not in of_sizes or value.target is _SIZE:
                continue
            needed = _sources_of(value, of_sizes)
            read = [each for each in node.all_input_nodes if each not in of_sizes]
            found = {each: _place_of(each.meta["val"], read) for each in needed}
            if all(found.values()):
                with graph.inserting_before(node):
                    made = _copied_chain(graph, value, found)
                node.replace_input_with(value, made)
    graph.eliminate_dead_code()


def _sources_of(value: fx.Node, of_sizes: Collection[fx.Node]) -> set[fx.Node]:
    """Return the sizes of tensors from which a value is computed."""
    if value.target is _SIZE:
        return {value}
    return set().union(*(_sources_of(each, of_sizes) for each in value.all_input_nodes))


def _copied_chain(graph: fx.Graph, value: fx.Node, found: Mapping[fx.Node, Any]) -> fx.Node:
    """Copy the operations that compute a value from sizes, which are read from the tensors in `found`."""
    if value in found:
        made = graph.call_function(_SIZE, found[value])
    else:
        made = graph.node_copy(value, lambda each: _copied_chain(graph, each, found))
    made.meta = dict(value.meta)
    return made


def _shorten_sizes(graph: fx.Graph) -> None:
    """Read each size that an operation needs from a tensor that it reads anyway.

    Else one number of the input would cross every cut.
    """
    for node in [node for node in graph.nodes if node.target is _SIZE]:
        size = node.meta["val"]
        for user in list(node.users):
            found = _place_of(size, user.all_input_nodes)
            if found is None and _leave_to_torch(node, user):
                continue
            found = found or _place_before(size, user)
            if found is None or found == tuple(node.args):
                continue
            with graph.inserting_before(user):
                own = graph.call_function(_SIZE, found)
                own.meta["val"] = size
            user.replace_input_with(node, own)
        if not node.users:
            graph.erase_node(node)


def _leave_to_torch(size: fx.Node, user: fx.Node) -> bool:
    """Write a size that a reshape gives as -1, if no other one is; return whether it was written."""
    if user.target not in _RESHAPES:
        return False
    lengths = list(cast(Sequence[Any], user.args[1]))
    if -1 in lengths or lengths.count(size) != 1:
        return False
    user.args = (user.args[0], [-1 if each is size else each for each in lengths])
    return True


def _place_before(size: Any, user: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the nearest tensor before an operation that has a size, as where samples and words were made rows."""
    seen, read = set[fx.Node](), [user]
    while read:
        before = [each for node in read for each in node.all_input_nodes]
        read = [each for each in dict.fromkeys(before) if each not in seen]
        # Sizes are read from tensors far before.
        read = [each for each in read if each.target is not _SIZE]
        seen.update(read)
        found = _place_of(size, read)
        if found is not None:
            return found
    return None


def _place_of(size: Any, read: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return one of the tensors that an operation reads, and its dimension of a size, if there is one."""
    for given in read:
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
        if node.target in _LIKE_FACTORIES:
            node.target, node.args = _LIKE_FACTORIES[node.target], node.args[1:]
            node.kwargs = {"dtype": node.meta["val"].dtype}
        elif node.target in _FACTORIES:
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
