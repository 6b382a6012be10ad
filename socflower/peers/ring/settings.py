"""How groups of real machines exchange gradients: `[ring]` of a scenario, or an argument of strategies."""

from typing import Annotated

from pydantic import Field

from socflower.field_rules import OneOf, checked
from socflower.wire.message_keys import TRANSPORTS

# About 116 days.
_MAX_S = 1e7
MOST_NODES = 100_000


@checked
class RingSettings:
    """How groups of real machines exchange gradients.

    `transport`: "gloo" for a trusted network, "grpc" with mutual TLS for any other; "auto" uses what the nodes are
    configured for. A ring drops a member that does not answer for `heartbeat_s`, and starts without one that does not
    join within `rendezvous_s`. If the member that answers for a group is silent for `leader_grace_s` longer than the
    others, another member is asked for the model. A training of groups starts, continues and resumes with `min_nodes`
    of its nodes, or more; None: it starts with half of them, and continues with any.
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
    min_nodes: Annotated[
        int | None,
        Field(
            gt=0,
            le=MOST_NODES,
            description=(
                "with how many nodes a training of groups starts, continues and resumes; the others take part when "
                "they come; default: half at the start, one later"
            ),
        ),
    ] = None
