"""Transfer learning: subsets of a data set's classes, and weights trained on other classes."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from socflower.errors import ConfigError
from socflower.workloads.dataset import LabelledData


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
            raise ConfigError(
                f"classes: there is no class {label}, labels are 0..{images.num_classes - 1}"
            )
    renumbered = torch.full((images.num_classes,), -1, dtype=torch.int64)
    renumbered[list(classes)] = torch.arange(len(classes))
    labels = renumbered[images.labels]
    rows = torch.nonzero(labels >= 0).flatten()
    inputs = images.inputs.index_select(0, rows)
    return LabelledData(inputs, labels.index_select(0, rows), images.mean, images.std, len(classes))


def load_weights(model: nn.Module, path: Path, *, except_head: bool = True) -> tuple[str, ...]:
    """Load the tensors of `path`, an npz of arrays named as in the state dict; return the names not loaded.

    With `except_head` the last layer with weights is not loaded, since its classes differ: the file's arrays for it may
    have any shape, or be missing. All other names and shapes must match exactly; otherwise ConfigError is raised, as
    for a file that cannot be read, and the model is unchanged.
    """
    arrays = _read(path)
    state = model.state_dict()
    head = list(state)[-1].rpartition(".")[0] if state else ""
    left_out = tuple(name for name in state if except_head and name.rpartition(".")[0] == head)
    taken = [name for name in state if name not in left_out]
    if missing := [name for name in taken if name not in arrays]:
        raise ConfigError(
            f"weights {path}: no array {missing[0]!r} ({len(missing)} missing); it is of another model"
        )
    if unexpected := [name for name in arrays if name not in state]:
        raise ConfigError(
            f"weights {path}: the model has no {unexpected[0]!r} ({len(unexpected)} too many); it is of "
            "another model"
        )
    for name in taken:
        if arrays[name].shape != tuple(state[name].shape):
            other_head = not except_head and name.rpartition(".")[0] == head
            hint = "leave out the head" if other_head else "it is of another model"
            raise ConfigError(
                f"weights {path}: {name} has shape {arrays[name].shape}, the model's has "
                f"{tuple(state[name].shape)}; {hint}"
            )
        if arrays[name].dtype.kind not in "biuf":
            raise ConfigError(
                f"weights {path}: {name} is of type {arrays[name].dtype}; numbers are needed"
            )
    with torch.no_grad():
        for name in taken:
            state[name].copy_(torch.from_numpy(arrays[name]))
    return left_out


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        # Without pickle: the file may be untrusted.
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                return dict(found)
    except FileNotFoundError as error:
        raise ConfigError(
            f"weights {path}: no such file; `socflower run --save-model` writes one"
        ) from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"weights {path}: not a readable .npz file: {reason}") from error
    raise ConfigError(f"weights {path}: a single array; give the .npz that a run saved")
