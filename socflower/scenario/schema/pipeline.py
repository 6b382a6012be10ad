"""`[pipeline]` of a scenario: how a model is cut and a mini-batch divided, for the strategy `hybrid-pipeline`."""

import json
from math import prod
from typing import Annotated

from pydantic import Field

from socflower.field_rules import OneOf
from socflower.toml_file import Table
from socflower.wire.codecs.error_feedback import FORMS, Form
from socflower.wire.codecs.quantisation import BITS

PIPELINE_STRATEGY = "hybrid-pipeline"

LANGUAGE_MODELS = ("bert-small", "gpt-small")
"""Models of token ids, which can be planned with `sample = [tokens]`."""

CUTS = ("layers", "blocks", "operations")
PEERS = ("single-device", "data-parallel", "pipeline-parallel", "2d")
"""What a plan is compared with."""

_MAX_SAMPLES = 1_000_000_000
_MOST_TOKENS, _MOST_VALUES = 65_536, 1 << 24  # of a sample

Size = Annotated[int, Field(gt=0, le=1_000_000)]


class PipelineConfig(Table):
    """`[pipeline]`: of `hybrid-pipeline`"""

    micro_batch_sizes: tuple[Size, ...] = Field(
        (),
        description=(
            "samples of a micro-batch, of which the planner takes the best; default: a 4th, 8th, 16th and 32nd of the "
            "mini-batch"
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
        if self.sample and (
            len(self.sample) == 2 or (len(self.sample) == 3 and self.sample[1] != self.sample[2])
        ):
            raise ValueError(
                f"sample = {list(self.sample)}: write [channels, pixels, pixels] of a square image, or "
                "[tokens]"
            )
        if prod(self.sample) > _MOST_VALUES or (
            len(self.sample) == 1 and self.sample[0] > _MOST_TOKENS
        ):
            raise ValueError(
                f"sample = {list(self.sample)}: is larger than anything that is trained; at most "
                f"{_MOST_TOKENS} tokens, or {_MOST_VALUES} values of an image"
            )
        if bool(self.sample) != bool(self.num_samples):
            raise ValueError(
                f"sample = {list(self.sample)} and num_samples = {self.num_samples} describe data that "
                "are not there; give both or none"
            )
        if self.activation_feedback != "none" and self.activation_bits == 32:
            raise ValueError(
                f"activation_feedback = {self.activation_feedback!r}: activation_bits = 32 loses nothing "
                "to correct for; leave it out, or give fewer bits"
            )
        if len(set(self.int8_socs)) < len(self.int8_socs) and self.int8_socs != "auto":
            raise ValueError(
                f"int8_socs = {list(self.int8_socs)} names a SoC twice; name each once"
            )
        if self.int8_socs and self.cuts == "operations":
            raise ValueError(
                f"int8_socs = {json.dumps(self.int8_socs)}: with cuts = 'operations' a stage may have "
                "nothing that int8 computes; use 'layers' or 'blocks'"
            )
        if self.num_classes and not self.sample:
            raise ValueError(
                f"num_classes = {self.num_classes} is for a model with sample; data have their own"
            )
