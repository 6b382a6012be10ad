"""The error that the codec causes in the returned gradient, and the share that error feedback corrects (F24, F25).

Accuracies differ more between seeds than between forms of error feedback, so gradients are compared instead. At one
state of a network, the front half needs δ, the gradient at its features h; it gets δ̂, the gradient at the decoded h′,
and corrects it. Both are computed and compared, batch by batch.
"""

import copy
import statistics
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from socflower.edgecloud.half_protocols import Array
from socflower.model_graph.cut_points import capture_split
from socflower.wire.codecs.error_feedback import FORMS, ErrorFeedback
from socflower.wire.codecs.quantisation import GROUPINGS, decode, encode
from socflower.workloads.dataset import LabelledData


def gradient_errors(
    model: nn.Module,
    images: LabelledData,
    *,
    cut: str,
    batch_size: int,
    num_batches: int,
) -> list[dict[str, Any]]:
    """Return mean relative errors over some batches, for every width and for ranges per tensor and per sample.

    `features` is |h′ − h|/|h|, `none` |δ̂ − δ|/|δ|, followed by the latter after each form of the paper's.
    `windows` is `none` with δ summed over the windows of the max-pooling behind the cut, so that it does not matter
    which pixel of a window the gradient goes to.
    """
    own = copy.deepcopy(model)
    split = capture_split(own, tuple(images.inputs.shape[1:]))
    behind = own.get_submodule(str(int(cut) + 1))
    assert isinstance(behind, nn.MaxPool2d) and behind.kernel_size == 2, behind
    # As in training: the effect of BatchNorm on a batch is part of the gradient.
    split.set_training_mode()
    front, back = split.front(split.cut_named(cut)), split.back(split.cut_named(cut))
    batches = []
    for start in range(0, batch_size * num_batches, batch_size):
        inputs, labels = images.batch(torch.arange(start, start + batch_size))
        with torch.no_grad():
            features = front(inputs)
        batches.append((np.array(features.numpy(), order="C"), labels))
    rows = []
    for bits in (16, 8, 4, 2):
        for grouping in GROUPINGS:
            found = [
                _errors(back, features, labels, decode(encode(features, bits, grouping=grouping)))
                for features, labels in batches
            ]
            rows.append(
                {
                    "bits": bits,
                    "grouping": grouping,
                    **{key: statistics.mean(each[key] for each in found) for key in found[0]},
                }
            )
    return rows


def _errors(
    back: nn.Module, features: Array, labels: torch.Tensor, decoded: Array
) -> dict[str, float]:
    wanted, got = _gradient(back, features, labels), _gradient(back, decoded, labels)
    errors = {
        "features": _distance(decoded, features),
        "none": _distance(got, wanted),
        "windows": _distance(_by_window(got), _by_window(wanted)),
    }
    for form in FORMS[1:]:
        feedback = ErrorFeedback(form)
        feedback.keep(0, features, decoded)
        errors[f"{form}, paper"] = _distance(feedback.correct(0, got), wanted)
    return errors


def _gradient(back: nn.Module, features: Array, labels: torch.Tensor) -> Array:
    leaf = torch.from_numpy(np.array(features)).requires_grad_()
    loss = functional.cross_entropy(back(leaf), labels)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient.numpy()


def _by_window(gradient: Array) -> Array:
    num_samples, channels, height, width = gradient.shape
    windows = gradient.reshape(num_samples, channels, height // 2, 2, width // 2, 2)
    summed: Array = windows.sum(axis=(3, 5))
    return summed


def _distance(found: Array, wanted: Array) -> float:
    return float(
        np.linalg.norm(np.subtract(found, wanted, dtype=np.float64)) / np.linalg.norm(wanted)
    )
