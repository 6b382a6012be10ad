"""The recipes: networks, images, hyper-parameters; chosen without a split and equal for all variants."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from socflower.wire.codecs.error_feedback import Form
from socflower.wire.codecs.quantisation import Grouping
from socflower.workloads.dataset import DataSet, LabelledData
from socflower.workloads.transfer import class_subset

MIDDLE, LATE = "6", "10"
"""Cuts of VGG-tiny, after the activations of the second and the third of its four convolutions.

The front half has 48 % of the arithmetic and 8 % of the weights, and 8,192 elements per sample cross the cut; with the
later cut 83 %, 37 % and 4,096. So a large part of the network learns from late gradients.
"""

SettingName: TypeAlias = Literal[
    "scratch", "scratch, fast", "scratch, late cut", "pre-training", "anew", "type 1", "type 2"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a network is trained: SGD with momentum; the rate rises linearly and falls along half a cosine."""

    # Of the data set; None: all.
    classes: tuple[int, ...] | None
    num_images: int
    # Other training images, on which learning rates are compared.
    num_held_out: int
    epochs: int
    batch_size: int
    learning_rate: float
    cut: str = MIDDLE
    momentum: float = 0.9
    weight_decay: float = 5e-4
    # As a share of all batches.
    warm_up: float = 0.2

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch; their sizes differ by at most one."""
        return math.ceil(self.num_images / self.batch_size)

    @property
    def num_batches(self) -> int:
        """Batches of the training."""
        return self.epochs * self.batches_per_epoch

    def schedule(self, batch: int) -> float:
        """Return the factor on the learning rate for a batch."""
        rising = self.warm_up * self.num_batches
        if batch < rising:
            return (batch + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (batch - rising) / (self.num_batches - rising)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """How the two halves of a network are trained together; None for `window` trains the undivided network.

    Every gradient comes as late as the window K allows: K batches late, as behind a slow link; or with `groups` as in
    the paper's grouped pipeline, where K + 1 batches go forward and then their gradients come, K to 0 batches late.
    """

    name: str
    window: int | None
    groups: bool = False
    bits: int = 32
    feedback: Form = "none"
    grouping: Grouping = "tensor"
    # Features are sent as changes since they were last sent.
    delta: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One training: its recipe, its variant, and the seed of the initial weights and of the samples' order."""

    setting: SettingName
    variant: Variant
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the training among others."""
        return self.setting, self.variant.name, self.seed


NORMAL = Variant(name="normal", window=None)
PIPELINED = Variant(name="K = 5", window=5)


def _bits(bits: int) -> str:
    return f"K = 5, {bits} bits"


WIDTHS = tuple(Variant(name=_bits(bits), window=5, bits=bits) for bits in (8, 4, 2))
GROUPS = tuple(
    Variant(
        name=f"K = 5, {bits} bits, groups" if bits < 32 else "K = 5, groups",
        window=5,
        bits=bits,
        groups=True,
    )
    for bits in (8, 32)
)
DELTA = tuple(
    Variant(name=f"{_bits(bits)}, delta", window=5, bits=bits, delta=True) for bits in (4, 2)
)
PER_SAMPLE = tuple(
    Variant(name=f"{_bits(bits)}, per sample", window=5, bits=bits, grouping="sample")
    for bits in (4, 2)
)
_FORMS: tuple[Form, ...] = ("diagonal", "rank-one")
FEEDBACK = tuple(
    Variant(name=f"{_bits(bits)}, {form}", window=5, bits=bits, feedback=form)
    for bits in (8, 4, 2)
    for form in _FORMS
)
WINDOWS = tuple(Variant(name=f"K = {window}", window=window) for window in (1, 2, 10))


def is_judged(setting: str, variant: str) -> bool:
    """Return whether a variant must be within a point of normal: 8 bits, also with Algorithm 1 (Table 4)."""
    return setting in ("scratch", "type 1", "type 2") and variant in (
        "K = 5, 8 bits",
        "K = 5, 8 bits, diagonal",
    )


def works(seeds: Sequence[int]) -> list[Work]:
    """Return all trainings, the most important first, so that an interrupted benchmark has comparable runs."""

    def each(
        setting: SettingName, variants: Sequence[Variant], of: Sequence[int] = seeds
    ) -> list[Work]:
        return [
            Work(setting=setting, variant=variant, seed=seed) for seed in of for variant in variants
        ]

    one, others = seeds[:1], seeds[1:]
    return [
        *each("scratch", [NORMAL, PIPELINED, *WIDTHS, GROUPS[0]]),
        *each("pre-training", [NORMAL]),
        *each("type 1", [NORMAL, PIPELINED, *WIDTHS, GROUPS[0]]),
        *each("type 2", [NORMAL, PIPELINED, WIDTHS[0]]),
        *each("anew", [NORMAL]),
        *each("scratch", [*DELTA, *PER_SAMPLE], one),
        *each("scratch, fast", [NORMAL, PIPELINED, WIDTHS[0], GROUPS[0], *WINDOWS], one),
        *each("scratch", FEEDBACK[:1]),
        *each("scratch", FEEDBACK[1:], one),
        *each("scratch, fast", [NORMAL, PIPELINED, WIDTHS[0], GROUPS[0]], others),
        *each("scratch, late cut", [PIPELINED, WIDTHS[0], GROUPS[0]], one),
        *each("scratch", [*DELTA, *PER_SAMPLE], others),
        *each("scratch", FEEDBACK[1:], others),
        *each("scratch", [GROUPS[1]]),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The data set and its recipes."""

    dataset: str
    recipes: dict[SettingName, Recipe]
    seeds: tuple[int, ...]
    # Steps after which K = 0 must have the weights of training without a split, bit for bit.
    num_compared: int
    model: str = "vgg-tiny"


def full_plan() -> Plan:
    """Return the trainings on CIFAR-10.

    "scratch, fast" is the best recipe for normal training out of batch sizes 16, 32 and 64 with two to four rates each.
    The others have smaller batches and lower rates, so that weights change less while K batches pass.
    """
    fast = Recipe(
        classes=None,
        num_images=25_000,
        num_held_out=5_000,
        epochs=4,
        batch_size=64,
        learning_rate=0.05,
    )
    gentle = replace(fast, batch_size=16, learning_rate=0.005)
    first = replace(fast, classes=tuple(range(5)), num_held_out=0, epochs=3)
    rest = replace(gentle, classes=tuple(range(5, 10)), num_images=5_000)
    return _plan("cifar10", fast, gentle, first, rest, seeds=(1, 2, 3), num_compared=8)


def quick_plan() -> Plan:
    """Return the same trainings on handwritten digits, which take seconds."""
    fast = Recipe(
        classes=None, num_images=640, num_held_out=300, epochs=1, batch_size=64, learning_rate=0.05
    )
    gentle = replace(fast, batch_size=32, learning_rate=0.01)
    first = replace(fast, classes=tuple(range(5)), num_held_out=0, epochs=2)
    rest = replace(gentle, classes=tuple(range(5, 10)), num_images=320)
    return _plan("digits", fast, gentle, first, rest, seeds=(1,), num_compared=3)


def _plan(
    dataset: str,
    fast: Recipe,
    gentle: Recipe,
    first: Recipe,
    rest: Recipe,
    *,
    seeds: tuple[int, ...],
    num_compared: int,
) -> Plan:
    recipes: dict[SettingName, Recipe] = {
        "scratch": gentle,
        "scratch, fast": fast,
        "scratch, late cut": replace(gentle, cut=LATE),
        "pre-training": first,
        "anew": rest,
        "type 1": rest,
        "type 2": rest,
    }
    return Plan(dataset=dataset, recipes=recipes, seeds=seeds, num_compared=num_compared)


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The training images of a recipe, held-out ones, and test images."""

    train: LabelledData
    held_out: LabelledData
    test: LabelledData


def images_of(recipe: Recipe, dataset: DataSet) -> Images:
    """Return a recipe's images, drawn at random from the training images and equal for all seeds."""
    train, test = dataset.train, dataset.test
    if recipe.classes is not None:
        train, test = class_subset(train, recipe.classes), class_subset(test, recipe.classes)
    order = np.random.default_rng(0).permutation(len(train))
    stop = recipe.num_images + recipe.num_held_out
    if stop > len(train):
        raise ValueError(f"{stop} images asked, {len(train)} available")
    return Images(
        train=train.select(order[: recipe.num_images]),
        held_out=train.select(order[recipe.num_images : stop]),
        test=test,
    )
