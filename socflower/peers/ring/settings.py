"""How groups exchange gradients where their members are real machines: `[ring]` of a scenario, or a value of apps."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from socflower.errors import ConfigError, require_range, require_type
from socflower.plain_numbers import plain_numbers
from socflower.toml_file import OneOf
from socflower.wire.message_keys import COMPRESSIONS, TRANSPORTS

_MAX_S = 1e7  # 116 days


@plain_numbers
@dataclass(frozen=True, kw_only=True, slots=True)
class RingSettings:
    """How groups exchange gradients where their members are real machines.

    `transport`: "gloo" for a trusted network, "grpc" with mutual TLS for any other; "auto" uses what the nodes are
    configured for. `compression`: "none", "fp16", "int8", "int8-stochastic" or "dgc". A ring drops a member that does
    not answer for `heartbeat_s`, and starts without one that does not join within `rendezvous_s`. If the member that
    answers for a group is silent for `leader_grace_s` longer than the others, another member is asked for the model.
    """

    transport: Annotated[
        str,
        OneOf(TRANSPORTS),
        Field(
            description=(
                "`auto` is what the nodes are [configured for](guides/deployment.md#gloo-or-grpc)"
            )
        ),
    ] = "auto"
    compression: Annotated[
        str,
        OneOf(COMPRESSIONS),
        Field(
            description=("what is [sent instead](guides/deployment.md#fewer-bytes) of FP32 sums")
        ),
    ] = "none"
    heartbeat_s: Annotated[
        float,
        Field(
            gt=0,
            le=_MAX_S,
            description=(
                "real seconds without a sign of life after which a member is taken for hung"
            ),
        ),
    ] = 5.0
    rendezvous_s: Annotated[
        float,
        Field(
            gt=0,
            le=_MAX_S,
            description=("how long members wait for those that have not come, when a round begins"),
        ),
    ] = 90.0
    leader_grace_s: Annotated[
        float,
        Field(
            gt=0,
            le=_MAX_S,
            description=(
                "after another member's answer, how long the strategy waits for the one that brings the model"
            ),
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        for key, known in (("transport", TRANSPORTS), ("compression", COMPRESSIONS)):
            if getattr(self, key) not in known:
                raise ConfigError(
                    f"rings: {key} = {getattr(self, key)!r} is unknown; use one of {', '.join(known)}"
                )
        require_type(
            "rings",
            (int, float),
            "a number of seconds",
            heartbeat_s=self.heartbeat_s,
            rendezvous_s=self.rendezvous_s,
            leader_grace_s=self.leader_grace_s,
        )
        require_range(
            "rings",
            above=0.0,
            most=_MAX_S,
            heartbeat_s=self.heartbeat_s,
            rendezvous_s=self.rendezvous_s,
            leader_grace_s=self.leader_grace_s,
        )
