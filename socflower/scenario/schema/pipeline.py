"""`[pipeline]` of a scenario: how a model is cut and a mini-batch divided, for the strategy `hybrid-pipeline`."""

from math import prod
from typing import Annotated

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf
from socflower.scenario.schema.key_rules import require_both_or_none, require_distinct, shown
from socflower.toml_file import Table
from socflower.wire.codecs.error_feedback import FORMS, Form
from socflower.wire.codecs.quantisation import BITS

LANGUAGE_MODELS = ("bert-small", "gpt-small")
"""Models of token ids, which can be planned with `sample = [tokens]`."""

CUTS = ("layers", "blocks", "operations")
PEERS = ("single-device", "data-parallel", "pipeline-parallel", "2d")
"""What a plan is compared with, all with one exchange of gradients an update."""
LAXER, INT8 = ("local-sgd", "fedavg"), "-int8"
"""Trainings that average models more seldom, and the end of the names of those in int8; none of them is chosen."""
CLAIMED = tuple(f"{name}{end}" for end in ("", INT8) for name in (*PEERS, *LAXER))

_MAX_SAMPLES = 1_000_000_000
# The largest samples that are planned.
_MOST_TOKENS, _MOST_VALUES = 65_536, 1 << 24

Size = Annotated[int, Field(gt=0, le=1_000_000)]


class PipelineConfig(Table):
    """`[pipeline]`: of `hybrid-pipeline` and `2d`"""

    micro_batch_sizes: tuple[Size, ...] = Field(
        (),
        description=(
            "samples of a micro-batch, of which the planner takes the best; default: a 4th, 8th, 16th and 32nd of the "
            "mini-batch, or the next smaller divisors"
        ),
    )
    cuts: Annotated[str, OneOf(CUTS)] = Field(
        "layers",
        description=(
            "between `layers` that multiply, between residual `blocks`, or behind all `operations`"
        ),
    )
    sample: tuple[Size, ...] = Field(
        (),
        max_length=3,
        description=(
            "without data: [channels, pixels, pixels], or [tokens] of `bert-small` and `gpt-small`"
        ),
    )
    num_classes: int = Field(0, ge=0, le=1_000_000, description=("with `sample`; default: 10"))
    num_samples: int = Field(0, ge=0, le=_MAX_SAMPLES, description="of an epoch, with `sample`")

    activation_bits: Annotated[int, OneOf(BITS)] = Field(
        32, description=("of activations that cross a cut")
    )
    gradient_bits: Annotated[int, OneOf(BITS)] = Field(
        32, description="of the activations' gradients"
    )
    activation_feedback: Annotated[Form, OneOf(FORMS)] = Field(
        "none",
        description=("gradients that come back are corrected for what `activation_bits` lose"),
    )
    int8_socs: Annotated[str, OneOf(("auto",))] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (),
        description=(
            'SoCs whose [stages compute in int8](guides/pipelines.md#in-your-app); "auto": all that have an int8 '
            "processor"
        ),
    )
    backup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description=(
            "real machines: updates between copies of stages on one device, on the next stage's; 0: once a round"
        ),
    )
    profiles: tuple[Annotated[str, Field(pattern=r"\S")], ...] = Field(
        (),
        description=(
            "files of `socflower profile --layers`, each with a device's measured seconds; other devices' are estimated"
        ),
    )

    def check(self) -> None:
        """Refuse samples of no known form, and keys that only a sample has."""
        is_image = len(self.sample) == 3 and self.sample[1] == self.sample[2]
        if self.sample and not (is_image or len(self.sample) == 1):
            raise ConfigError(
                f"{shown(self, 'sample')}: write [channels, pixels, pixels] of a square image, or [tokens]"
            )
        if prod(self.sample) > (_MOST_VALUES if is_image else _MOST_TOKENS):
            raise ConfigError(
                f"{shown(self, 'sample')}: give at most {_MOST_TOKENS} tokens, or {_MOST_VALUES} values "
                "of an image"
            )
        require_both_or_none(self, "sample", "num_samples")
        if self.activation_feedback != "none" and self.activation_bits == 32:
            raise ConfigError(
                f"{shown(self, 'activation_feedback')}: activation_bits = 32 loses nothing; leave it out"
            )
        if self.int8_socs != "auto":
            require_distinct("int8_socs", self.int8_socs)
        if self.int8_socs and self.cuts == "operations":
            raise ConfigError(
                f"{shown(self, 'int8_socs')}: a stage between 'operations' may have nothing that int8 "
                "computes; use cuts = 'layers' or 'blocks'"
            )
        if self.num_classes and not self.sample:
            raise ConfigError(f"{shown(self, 'num_classes')} is for a sample; leave it out")
