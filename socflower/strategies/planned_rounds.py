"""What our strategies and resumed foreign ones share: skipping rounds that are done, and refusing unplanned ones."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from logging import INFO
from typing import Any, NoReturn, TypeAlias, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from socflower.errors import ConfigError, TrainingFailed, require_type
from socflower.flower_adapter import log
from socflower.plain_numbers import plain_numbers
from socflower.wire.message_keys import SERVER_ROUND

EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


class Resumable(Strategy):
    """A strategy whose training can continue after a round other than 0; mix in before the strategy itself.

    Flower and wrapping strategies count every `start` from 1. A resumed training therefore goes through all its
    rounds; rounds that are done send nothing and change nothing. State that a strategy keeps between rounds, such
    as FedAdam's moments, is not restored here.
    """

    resumed_after = 0
    _open_round = 0  # whose messages were made and whose replies have not arrived

    @plain_numbers
    def resume_from(self, server_round: int) -> None:
        """Make `start` continue after `server_round`, from the arrays that round ended with.

        `start` is called with the same arguments as before, including `num_rounds` of the whole training, and with
        `evaluate_fn=strategy.skip_done_rounds(evaluate)`. If no round is left, its result has no arrays.
        """
        self._require_round(server_round)
        self.resumed_after = server_round

    def _require_round(self, server_round: int) -> None:
        """Raise `ConfigError` if the training cannot continue after this round."""
        require_type("resume_from", (int,), "a whole number", server_round=server_round)
        if server_round < 0:
            raise ConfigError(
                f"resume_from({server_round}): rounds are counted from 1; 0 is a new start"
            )

    def skip_done_rounds(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        """Return `evaluate_fn` without the rounds that were done before the resume."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            return (
                None
                if self.resumed_after and server_round <= self.resumed_after
                else evaluate_fn(server_round, arrays)
            )

        return evaluate

    def is_done(self, server_round: int) -> bool:
        """Return whether the round was done before the resume."""
        return server_round <= self.resumed_after

    def _begins(self, server_round: int) -> bool:
        """Return whether the round is to be trained, and record that its replies are expected."""
        if self.is_done(server_round):
            log(INFO, "round %d: done before the resume", server_round)
            return False
        self._open_round = server_round
        return True

    def _ends(self, server_round: int) -> bool:
        """Return whether the round was trained, and record that its replies have arrived."""
        self._open_round = 0
        return not self.is_done(server_round)

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Address clients as the strategy does; none in a round that is done."""
        if not self._begins(server_round):
            return []
        # The next class in the method resolution order is the actual strategy.
        return cast(Strategy, super()).configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate as the strategy does; nothing in a round that is done."""
        if not self._ends(server_round):
            return None, None
        return cast(Strategy, super()).aggregate_train(server_round, replies)

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Address clients as the strategy does; none in a round that is done.

        Raises `TrainingFailed` if a wrapping strategy withheld the round's replies, as Flower's differential privacy
        does in every round in which a client failed: training would continue with unchanged weights.
        """
        if self.is_done(server_round):
            return []
        if self._open_round == server_round:
            raise TrainingFailed(
                f"round {server_round}: its replies did not reach {type(self).__name__}: the strategy around it keeps "
                "them back, as Flower's differential privacy does where any client failed; Flower's log has the cause. "
                "Groups of SoCFlow that are started with GroupGrid(grid) keep such failures from it"
            )
        unread = [key for key in config if key != SERVER_ROUND]
        if unread and not getattr(self, "fraction_evaluate", 1.0):
            raise ConfigError(
                f"{type(self).__name__}: evaluate_config ({', '.join(unread)}) is not used: no client is "
                "asked to evaluate; evaluate in evaluate_fn, on the server"
            )
        return cast(Strategy, super()).configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate as the strategy does; nothing in a round that is done."""
        return (
            None
            if self.is_done(server_round)
            else cast(Strategy, super()).aggregate_evaluate(server_round, replies)
        )

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Raise `ConfigError`: Flower calls this of strategies in `ServerAppComponents`."""
        raise no_component(self)


class PlannedRounds(Resumable):
    """A strategy that knows its number of rounds; its model is evaluated by `evaluate_fn`, on the server."""

    fraction_evaluate = 0.0

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """How many rounds `start` needs for all epochs."""

    @plain_numbers
    def resume_from(self, server_round: int) -> None:
        """Make `start` continue after `server_round`; see `Resumable.resume_from`."""
        self._require_round(server_round)
        super().resume_from(server_round)

    def _require_round(self, server_round: int) -> None:
        """Raise `ConfigError` if the training cannot continue after this round."""
        super()._require_round(server_round)
        if server_round > self.num_rounds:
            raise ConfigError(
                f"resume_from({server_round}): the training has num_rounds = {self.num_rounds}"
            )

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Send nothing; raise `TrainingFailed` if the round's replies were withheld."""
        super().configure_evaluate(server_round, arrays, config, grid)
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return nothing; see `configure_evaluate`."""
        return None

    @plain_numbers
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        **named_args: Any,
    ) -> Result:
        """Train as every strategy does; `ConfigError` for more rounds than are planned."""
        if num_rounds > self.num_rounds:
            raise ConfigError(
                f"{type(self).__name__}: start was called with num_rounds = {num_rounds}, and the plan "
                f"has {self.num_rounds}; call start with num_rounds=strategy.num_rounds"
            )
        self._announce(grid, initial_arrays)
        return super().start(grid, initial_arrays, num_rounds, *args, **named_args)

    def _announce(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Tell a grid of an engine which strategy trains, and from which arrays; messages do not say it."""
        on_strategy = getattr(grid, "on_strategy", None)
        if on_strategy is not None:
            on_strategy(self, arrays)

    def _begins(self, server_round: int) -> bool:
        # A strategy around this one has its own start.
        if not 1 <= server_round <= self.num_rounds:
            raise ConfigError(
                f"{type(self).__name__}: round {server_round} of a plan of {self.num_rounds} rounds; "
                "call start with num_rounds=strategy.num_rounds"
            )
        return super()._begins(server_round)


def no_component(strategy: Strategy) -> ConfigError:
    """Return the error of a strategy of Flower's message API in `ServerAppComponents`, which has another API."""
    name = type(strategy).__name__
    return ConfigError(
        f"{name} in ServerAppComponents: that takes strategies of flwr.server.strategy, and {name} is "
        "one of Flower's message API; start it in the ServerApp's main function: @app.main() def "
        f"main(grid, context): {name}(...).start(GroupGrid(grid), ...)"
    )
