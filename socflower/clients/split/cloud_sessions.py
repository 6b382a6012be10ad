"""The cloud's side of a split training: builds its halves, and lets a ServerApp open and fetch them."""

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from numpy.typing import NDArray

from socflower.clients.split.in_process import (
    SplitSettings,
    load_half,
    party_batches,
    require_same_program,
)
from socflower.clients.split.remote_cloud import front_plan
from socflower.edgecloud.cloud.operator_calls import (
    CloudOperator,
    close_session,
    fetch_weights,
    open_session,
)
from socflower.edgecloud.cloud.session import CloudHalf, HostedFront, SessionFactory, SessionTerms
from socflower.edgecloud.half_protocols import Weights
from socflower.edgecloud.split_program import (
    Arrays,
    PlacedHalf,
    SplitProgram,
    starting_at,
    without_prefix,
)
from socflower.edgecloud.stream.frames import SplitRefused
from socflower.errors import ConfigError
from socflower.peers.resumable_stream import StreamLost
from socflower.plain_numbers import plain_numbers
from socflower.wire.split_message_keys import JOINED, OWN, TURNS, SplitTask

CloudDataFn: TypeAlias = Callable[[int, int], Any]
_Answer = TypeVar("_Answer")
_TASK = "task"
_PAUSE_S = 0.5


def session_factory(
    program: SplitProgram,
    *,
    settings: SplitSettings | None = None,
    data_fn: CloudDataFn | None = None,
) -> SessionFactory:
    """Return a factory of the cloud's halves of one program.

    `data_fn(party, num_parties)` returns the cloud's inputs for a party's samples in a reverse split.
    """

    def make(terms: SessionTerms, weights: Weights) -> CloudHalf:
        require_same_program(f"run {terms.run_id}", program, terms.fingerprint)
        if not isinstance(terms.settings.get(_TASK), Mapping):
            raise ConfigError(
                f"run {terms.run_id}: was opened without a split task; its manager must be "
                "socflower.CloudClient"
            )
        task = SplitTask.decode(terms.settings[_TASK])
        own = starting_at(program, task.session_first)
        if not task.reverse:
            back = own.back(task.cuts[0])
            _load(program, task, back, weights)
            return back.half
        if data_fn is None:
            raise ConfigError(
                f"run {terms.run_id}: a reverse split, and this cloud knows nothing of its samples; give "
                "session_factory data_fn"
            )
        party = task.parties[0]
        batches = party_batches(
            program, task, party, data_fn(party, task.num_parties), first=task.session_first
        )
        front = own.front(party, task.cuts[0], batches)
        _load(program, task, front, weights)
        return HostedFront(half=front.half, plan=front_plan(task, settings or SplitSettings()))

    return make


def _load(program: SplitProgram, task: SplitTask, half: PlacedHalf[Any], weights: Weights) -> None:
    if weights or task.frozen_sha256:
        load_half(
            program, task, half, {f"{half.prefix}{name}": array for name, array in weights.items()}
        )


@plain_numbers
class CloudClient:
    """The sessions of one training in one cloud, for `SplitReplay`.

    `name` is the prefix of the sessions' names, which keeps trainings apart; random by default. Calls are retried for
    `patience_s` if the cloud does not answer, since it may be restarting. Raises `StreamLost` if it still does not
    answer, and `SplitRefused` if the cloud refuses a request.
    """

    def __init__(
        self,
        operator: CloudOperator,
        program: SplitProgram,
        *,
        address: str = "",
        name: str = "",
        patience_s: float = 60.0,
    ) -> None:
        self._operator, self._program, self._patience_s = operator, program, patience_s
        self._address = address or operator.address
        self.name = name or f"run-{secrets.token_hex(4)}"
        self._open: dict[str, SplitTask] = {}

    def open(self, task: SplitTask, weights: Arrays) -> SplitTask:
        """Prepare the cloud's half for a task's parties; see `CloudSessions.open`.

        A session that missed batches, because the edge trained them alone, is restarted too.
        """
        run = self.name if task.mode in (JOINED, TURNS) else f"{self.name}-{task.parties[0]}"
        known = self._open.get(run)
        averaged = task.mode == OWN and task.num_parties > 1
        if known is not None and (
            known.first_batch == task.first_batch
            or (not averaged and known.first_batch + known.num_batches == task.first_batch)
        ):
            self._open[run] = replace(
                task,
                address=known.address,
                run=known.run,
                token=known.token,
                session_first=known.session_first,
            )
            return self._open[run]
        # The cloud saves these settings, and they must not contain the token.
        settings = {**task.encode(), "session-first": task.first_batch}
        token = self._call_with_retry(
            lambda: open_session(
                self._operator,
                run_id=run,
                fingerprint=task.fingerprint,
                weights=without_prefix(self._program.cloud_prefix, weights),
                settings={_TASK: settings},
                joined=task.mode == JOINED,
                num_parties=1 if task.mode == OWN else task.num_parties,
                reverse=task.reverse,
                replace=True,
            )
        )
        self._open[run] = replace(
            task, address=self._address, run=run, token=token, session_first=task.first_batch
        )
        return self._open[run]

    def fetch(self, run: str) -> dict[str, NDArray[Any]]:
        """Return the weights of a session's half by their names in the whole model.

        Raises `SplitRefused` if they are not those of the end of the round: the cloud was restarted without all of its
        files.
        """
        batch, weights = self._call_with_retry(lambda: fetch_weights(self._operator, run))
        task = self._open[run]
        if task.session_first + batch != (stop := task.first_batch + task.num_batches):
            raise SplitRefused(
                f"run {run}: the cloud's half is at batch {task.session_first + batch} and its edges at "
                f"{stop}; give the cloud a folder that outlives it, and start the run again"
            )
        return {f"{self._program.cloud_prefix}{name}": array for name, array in weights.items()}

    def close(self) -> None:
        """Close all sessions. Their results are fetched by now, so an unreachable cloud is ignored."""
        for run in list(self._open):
            with suppress(StreamLost, SplitRefused):
                close_session(self._operator, run)
            del self._open[run]

    def _call_with_retry(self, call: Callable[[], _Answer]) -> _Answer:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return call()
            except StreamLost:
                if time.monotonic() + _PAUSE_S > deadline_s:
                    raise
                time.sleep(_PAUSE_S)
