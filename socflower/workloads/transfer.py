"""Transfer learning: subsets of a data set's classes, and weights trained on other classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from socflower.errors import ConfigError
from socflower.workloads.dataset import LabelledData
from socflower.workloads.weights_file import read_weights


def class_subset(images: LabelledData, classes: Sequence[int]) -> LabelledData:
    """Return the samples of `classes`, in their original order, with label i for `classes[i]`.

    Raises ConfigError for no classes, for duplicates and for classes that the data do not have.
    """
    if not classes:
        raise ConfigError("classes: name one or more")
    if len(set(classes)) != len(classes):
        raise ConfigError(f"classes: {list(classes)} names a class twice")
    for label in classes:
        if not 0 <= label < images.num_classes:
            raise ConfigError(f"classes: no class {label}, labels are 0..{images.num_classes - 1}")
    renumbered = torch.full((images.num_classes,), -1, dtype=torch.int64)
    renumbered[list(classes)] = torch.arange(len(classes))
    labels = renumbered[images.labels]
    rows = torch.nonzero(labels >= 0).flatten()
    inputs = images.inputs.index_select(0, rows)
    return LabelledData(inputs, labels.index_select(0, rows), images.mean, images.std, len(classes))


def load_weights(model: nn.Module, path: Path, *, except_head: bool = True) -> tuple[str, ...]:
    """Load the tensors of `path`, an npz of arrays named as in the state dict; return the names not loaded.

    With `except_head` the last layer with weights is not loaded, since its classes differ: the file's arrays for it may
    have any shape, or be missing. All other names and shapes must match exactly. Otherwise, and for a file that cannot
    be read, ConfigError is raised and the model is unchanged.
    """
    arrays = read_weights(path)
    state = model.state_dict()
    head = list(state)[-1].rpartition(".")[0] if state else ""
    in_head = tuple(name for name in state if name.rpartition(".")[0] == head)
    left_out = in_head if except_head else ()
    taken = [name for name in state if name not in left_out]
    problem = _problem(arrays, state, taken)
    if problem is not None:
        raise ConfigError(f"weights {path}: {problem}; is it of another model, or another head?")
    with torch.no_grad():
        for name in taken:
            state[name].copy_(torch.from_numpy(arrays[name]))
    return left_out


def _problem(
    arrays: Mapping[str, npt.NDArray[Any]], state: Mapping[str, Tensor], taken: Sequence[str]
) -> str | None:
    if missing := [name for name in taken if name not in arrays]:
        return f"no array {missing[0]!r} ({len(missing)} missing)"
    if unexpected := [name for name in arrays if name not in state]:
        return f"the model has no {unexpected[0]!r} ({len(unexpected)} too many)"
    for name in taken:
        found, wanted = arrays[name], tuple(state[name].shape)
        if found.shape != wanted:
            return f"{name} has shape {found.shape}, the model's has {wanted}"
        if found.dtype.kind not in "biuf":
            return f"{name} has elements of type {found.dtype}"
    return None
