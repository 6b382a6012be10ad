"""Streaming DiLoCo: a fragment of the model at a time is synchronised, while groups train on (Douillard et al., 2025).

A round is the interval between two synchronisations, each of one of P fragments in turn, so that each fragment is
synchronised every P rounds. Its outer gradient is its change since then, and the result reaches groups `delay_steps`
into the next round, where each mixes it into what it has trained by then (section 2.2 of arXiv 2501.18512):

    w = alpha · w + (1 - alpha) · outer step

All else of a group's model stays at its client. The hub's model has the latest outer step of each fragment. In one
process outer gradients may be compressed, in the paper to four bits, with error feedback of each fragment's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from socflower.cluster import Usage
from socflower.errors import ConfigError
from socflower.hierarchy import Fragment
from socflower.hierarchy.exchange.models import AUTO, KINDS, NONE, STAR
from socflower.strategies.group_replies import SettledRound
from socflower.strategies.leader_feedback import from_arrays, to_arrays
from socflower.strategies.methods.group_work import DataParallelWork
from socflower.strategies.methods.groups import GroupsMethod
from socflower.strategies.mixed_replies import group_id_of
from socflower.strategies.round import IN_PROCESS, GroupFeedback, Round
from socflower.strategies.settings import Streaming
from socflower.wire.message_keys import ARRAYS, STREAM, StreamTask, encode


def fragments_of(names: Iterable[str], num_fragments: int) -> list[list[str]]:
    """Return the tensors of each fragment: every P-th layer, as in the paper's strided pattern.

    Raises `ConfigError` for more fragments than layers.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    if num_fragments > len(layers):
        raise ConfigError(
            f"streaming: fragments = {num_fragments}, and the model has {len(layers)} layers; give so many at most"
        )
    of_layers = list(layers.values())
    return [
        [name for layer in of_layers[first::num_fragments] for name in layer]
        for first in range(num_fragments)
    ]


class StreamingMethod(GroupsMethod):
    """Rounds of groups of one SoC; every round synchronises one fragment."""

    def __init__(self, streaming: Streaming, *, work: DataParallelWork, **settings: Any) -> None:
        super().__init__(work=work, **settings)
        self._streaming, self._priced = streaming, work
        self._fragments: list[list[str]] = []
        self._whole = ArrayRecord()
        # What compressed exchanges of each fragment still owe, by group: a fragment's next exchange is P rounds later.
        self._feedback_of: dict[int, dict[int, GroupFeedback]] = {}
        # Groups whose clients have their model of the last round's end: the leader, by group, and their number.
        self._holders: dict[int, int] = {}
        self._num_holding = 0

    def require_each_model(self, needing: str) -> None:
        """Raise `ConfigError`: nothing else gets whole models."""
        raise ConfigError(f"streaming: replies have a fragment, and {needing} needs whole models")

    def _fragment(self, server_round: int) -> list[str]:
        """Return the names of the tensors that are synchronised at a round's end."""
        return self._fragments[self._index(server_round)]

    def _index(self, server_round: int) -> int:
        return (server_round - 1) % self._streaming.fragments

    def _size(self, server_round: int) -> Fragment | None:
        """Return what a round's end exchanges; None before the first round."""
        if server_round < 1:
            return None
        arrays = [self._whole[name] for name in self._fragment(server_round)]
        num_bytes = float(sum(len(array.data) for array in arrays))
        return Fragment(
            num_bytes=num_bytes, num_tensors=len(arrays), delay_steps=self._streaming.delay_steps
        )

    # ------------------------------------------------------------------------------------------ a round
    def open(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[Round, list[Message]]:
        """Send each group the fragment of the last round, or the whole model if it has none."""
        self._whole = arrays
        self._fragments = fragments_of(arrays, self._streaming.fragments)
        if self.work.clock is None:
            self.work.use_grid(grid, self.plan, arrays)
        latest = self._part(self._fragment(server_round - 1))
        this, messages = super().open(
            server_round, self._part(self._fragment(server_round)), config, grid
        )
        if len(this.plan.groups) != self._num_holding:
            # Groups of another plan begin again.
            self._holders = {}
        for message in messages:
            group = this.group_of_node[message.metadata.dst_node_id]
            is_whole = self._holders.get(group.group_id) != group.leader
            task = StreamTask(
                names=tuple(this.sent),
                is_whole=is_whole,
                delay_steps=self._streaming.delay_steps,
                mixing=self._streaming.alpha,
            )
            message.content[ARRAYS] = self._whole if is_whole else latest
            message.content[STREAM] = ConfigRecord(encode(task))
        return this, messages

    def _part(self, names: Sequence[str]) -> ArrayRecord:
        return ArrayRecord({name: self._whole[name] for name in names})

    def _make_round(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> Round:
        # A group of one exchanges nothing inside, so that its SoC needs no ring.
        return replace(
            super()._make_round(server_round, arrays, grid),
            transport=IN_PROCESS,
            feedback=self._feedback_of.get(self._index(server_round), {}),
        )

    def _ways_of_leaders(self, grid: Grid) -> Sequence[str]:
        if not self.planner.registry.ring_address_of:
            return KINDS
        compression = self.sync.exchange.leader_compression
        if compression != NONE or self.leaders not in (AUTO, STAR):
            raise ConfigError(
                f"streaming: leaders = {self.leaders!r}, leader_compression = {compression!r}: fragments of real "
                "machines meet at the hub as they are; leave both out"
            )
        return (STAR,)

    def settle(self, this: Round, replies: Sequence[Message]) -> SettledRound:
        """Read the replies, and remember whose model stays at its client."""
        settled = super().settle(this, replies)
        self._feedback_of[self._index(this.server_round)] = dict(self._feedback)
        leaders = {group.group_id: group.leader for group in this.plan.groups}
        self._holders = {
            group: leaders[group]
            for group in map(group_id_of, settled.usable)
            if group not in self._without_state
        }
        self._num_holding = len(leaders)
        return settled

    def complete(self, this: Round, made: ArrayRecord) -> ArrayRecord:
        """Return the hub's model with the fragment's outer step."""
        return ArrayRecord({**self._whole, **made})

    def price(self, this: Round, settled: SettledRound) -> Usage:
        """Return the usage of the round's steps beside the last one's synchronisation; the last waits for its own."""
        idle, clock = self.planner.drain_idle(), self._priced.clock
        if clock is None or this.costs is None:
            return idle
        is_last = this.server_round == self.num_rounds
        return idle + this.costs.run_streamed(
            this.interval,
            clock,
            self._size(this.server_round - 1),
            self._size(this.server_round) if is_last else None,
            self.planner.balancer.in_use,
        )

    # ------------------------------------------------------------------------------------------ resuming
    def save(self) -> dict[str, Any]:
        """Return the state of groups, whose model is at its client, and what fragments still owe."""
        holders = [[group, leader] for group, leader in self._holders.items()]
        owed = {
            f"{index}/{key}": array
            for index, feedback in self._feedback_of.items()
            for key, array in to_arrays(feedback).items()
        }
        own = {"holders": holders, "num_holding": self._num_holding, "feedback_of": owed}
        return {**super().save(), **own}

    def restore(self, server_round: int, state: Mapping[str, Any]) -> None:
        """Restore the state at the end of a round; clients must have their groups' states of it."""
        own = dict(state)
        self._holders = {int(group): int(leader) for group, leader in own.pop("holders", ())}
        self._num_holding = int(own.pop("num_holding", 0))
        by_fragment: dict[int, dict[str, Any]] = {}
        for key, array in own.pop("feedback_of", {}).items():
            index, _, rest = key.partition("/")
            by_fragment.setdefault(int(index), {})[rest] = array
        self._feedback_of = {index: from_arrays(owed) for index, owed in by_fragment.items()}
        super().restore(server_round, own)
