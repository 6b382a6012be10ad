"""Resuming a training: rounds keep their numbers, although Flower counts every `start` from 1."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from logging import INFO
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from socflower.errors import ConfigError
from socflower.wire.message_keys import SERVER_ROUND

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Resumable(Strategy):
    """A strategy whose `start` can begin after a round other than 0; mix in before the strategy itself.

    State that a strategy keeps between rounds, such as FedAdam's moments, is not restored here.
    """

    resumed_after = 0

    @property
    def asks_clients_to_evaluate(self) -> bool:
        """Whether EVALUATE messages are sent; `evaluate_config` is used only in them."""
        return bool(getattr(self, "fraction_evaluate", 1.0))

    def require_no_unused_settings(self, evaluate_config: ConfigRecord | None) -> None:
        """Raise `ConfigError` for settings of EVALUATE messages if no such messages are sent."""
        unread = [key for key in evaluate_config or () if key != SERVER_ROUND]
        if unread and not self.asks_clients_to_evaluate:
            raise ConfigError(f"{type(self).__name__}: evaluate_config ({', '.join(unread)}) is not used: no client "
                              "is asked to evaluate; evaluate in evaluate_fn, on the server")

    def resume_from(self, server_round: int) -> None:
        """Make `start` continue after `server_round`, from the arrays that round ended with.

        `start` is called with the same arguments as before, including `num_rounds` of the whole training. All methods
        and `evaluate_fn` get the original round numbers. The initial arrays are not evaluated again.
        """
        if server_round < 0:
            raise ConfigError(f"resume_from({server_round}): rounds are counted from 1; 0 is a new start")
        self.resumed_after = server_round

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the remaining rounds, as Flower does; see `Strategy.start` and `resume_from`."""
        if num_rounds < 1:
            raise ConfigError(f"start: num_rounds = {num_rounds} trains nothing; give strategy.num_rounds")
        self.require_no_unused_settings(evaluate_config)
        done = self.resumed_after
        if not done:
            return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        if done > num_rounds:
            raise ConfigError(f"resume_from({done}): start has num_rounds = {num_rounds}; give it those of the whole "
                              "training")
        log(INFO, "Resuming after round %d of %d; below, rounds are counted from there", done, num_rounds)

        def evaluate_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            return evaluate_fn(server_round + done, arrays) if evaluate_fn is not None and server_round else None

        result = _RoundOffset(self, done).start(
            grid, initial_arrays, num_rounds - done, timeout, train_config, evaluate_config,
            None if evaluate_fn is None else evaluate_round)
        for entry in fields(result):
            by_round = getattr(result, entry.name)
            if entry.name != "arrays" and isinstance(by_round, dict):
                setattr(result, entry.name, {number + done: value for number, value in by_round.items()})
        result.arrays = result.arrays or initial_arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid,
    ) -> Iterable[Message]:
        """Address clients as the strategy does; raise `ConfigError` for a round that was done before the resume."""
        self.require_not_done(server_round)
        # The next class in the method resolution order is the actual strategy.
        return cast(Strategy, super()).configure_train(server_round, arrays, config, grid)

    def require_not_done(self, server_round: int) -> None:
        """Raise `ConfigError` for a round that was done before the resume: the calling strategy has not resumed."""
        if self.resumed_after and server_round <= self.resumed_after:
            raise ConfigError(f"round {server_round} of a training that is resumed after round {self.resumed_after}: "
                              "the strategy around this one counts from 1; mix Resumable into its class, and call its "
                              f"resume_from({self.resumed_after}) too")


class _RoundOffset(Strategy):
    """The strategy that runs inside `Strategy.start`: forwards to the real one with round numbers shifted by `done`."""

    def __init__(self, strategy: Strategy, done: int) -> None:
        self._strategy = strategy
        self._done = done

    def summary(self) -> None:
        self._strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid,
    ) -> Iterable[Message]:
        return self._strategy.configure_train(server_round + self._done, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self._strategy.aggregate_train(server_round + self._done, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid,
    ) -> Iterable[Message]:
        return self._strategy.configure_evaluate(server_round + self._done, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self._strategy.aggregate_evaluate(server_round + self._done, replies)
