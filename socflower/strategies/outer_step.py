"""The outer step: a Flower strategy makes the next global model of the groups' models, as if groups were its clients.

Trained weights go through the strategy. Buffers, which clients name in their replies, are averaged by samples: an
adaptive step on BatchNorm's variance could make it negative, and its counter is not a weight.
"""

import copy
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from numpy.typing import NDArray

from socflower.errors import ConfigError, TrainingFailed, require_type
from socflower.hierarchy import first_non_finite
from socflower.quantities import are_counted, counted
from socflower.strategies.forwarding_grid import ForwardingGrid
from socflower.strategies.outer_momentum import OuterSGD
from socflower.strategies.planned_rounds import Resumable
from socflower.strategies.records import (
    aggregate_records,
    array_views,
    integers_of,
    layout_difference,
    layout_of,
    to_array_record,
    untrained_of,
)
from socflower.strategies.replies import num_examples_of
from socflower.wire.message_keys import (
    ARRAYS,
    CONFIG,
    GROUP_ID,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
    TRAIN_LOSS,
)

_PROXIMAL_MU = "proximal-mu"
_SETTINGS = {
    "fraction_train": 1.0,
    "weighted_by_key": NUM_EXAMPLES,
    "arrayrecord_key": ARRAYS,
    "configrecord_key": CONFIG,
}
"""Settings of Flower's strategies that groups do not leave open: all of them train, with the keys that clients read."""

_OF_MEANS = (
    FedAvg,
    FedProx,
    FedAvgM,
    FedAdagrad,
    FedAdam,
    FedYogi,
    OuterSGD,
)  # no subclass of them: it may do more


def takes_mean(strategy: Strategy) -> bool:
    """Return whether an outer strategy needs no more of the models than their mean."""
    return type(strategy) in _OF_MEANS


def proximal_mu_of(strategy: Strategy | None) -> float:
    """Return the weight of FedProx's term in the loss of groups; 0 for other strategies."""
    return float(strategy.proximal_mu) if isinstance(strategy, FedProx) else 0.0


class OuterStep:
    """A Flower strategy whose clients are groups.

    Raises `ConfigError` for a strategy that cannot take groups as its clients, or not so few.
    """

    def __init__(self, strategy: Strategy, num_groups: int, num_nodes: int) -> None:
        require_type(
            "outer",
            (Strategy,),
            "a strategy of Flower's, such as FedAdam(), or None",
            outer=strategy,
        )
        self.strategy = strategy
        self.name = type(strategy).__name__
        self._refuse_kind()
        self._refuse_settings(num_groups, num_nodes)
        self._made_with = {
            key: value for key, value in vars(strategy).items() if isinstance(value, int | float)
        }
        self._set_each_round: frozenset[str] = frozenset()
        try:
            self._trial = copy.deepcopy(
                strategy
            )  # as it is without the moments of a resumed training
        except Exception as error:
            raise ConfigError(
                f"outer = {self.name}(…) cannot be copied to be tried before round 1 "
                f"({_one_line(error)}); make what it holds outside of it"
            ) from None

    # ------------------------------------------------------------------------------------------ what is refused
    def _refuse_kind(self) -> None:
        strategy, name = self.strategy, self.name
        if isinstance(strategy, Resumable):
            raise ConfigError(
                f"outer = {name}(…) makes groups or rounds of its own; give a strategy of "
                "Flower's, such as FedAvg() or FedAdam()"
            )
        if isinstance(getattr(strategy, "strategy", None), Strategy):
            raise ConfigError(
                f"outer = {name}(…) wraps another strategy; put it around: {name}(SoCFlow(…), …)"
            )
        if isinstance(strategy, FedXgbBagging | FedXgbCyclic):
            raise ConfigError(
                f"outer = {name}(…) collects trees, and groups train the weights of a network; "
                "start it without SoCFlow, over clients that train trees"
            )

    def _refuse_settings(self, num_groups: int, num_nodes: int) -> None:
        strategy = self.strategy
        for key, needed in _SETTINGS.items():
            if (value := getattr(strategy, key, needed)) != needed:
                raise ConfigError(
                    f"outer = {self.name}({key}={value!r}) must be {needed!r}: every group "
                    "trains in every round, and clients read and write these keys"
                )
        least, default = getattr(strategy, "min_train_nodes", 0), 2
        if least > max(num_groups, default):
            raise ConfigError(
                f"outer = {self.name}(min_train_nodes={least}), and there "
                f"{are_counted(num_groups, 'group')} to train; leave it out"
            )
        for key in ("min_evaluate_nodes", "min_available_nodes"):
            if (least := getattr(strategy, key, 0)) > max(num_nodes, default):
                raise ConfigError(
                    f"outer = {self.name}({key}={least}), and there {are_counted(num_nodes, 'node')}; "
                    f"give {num_nodes} at most"
                )
        if fault := self.too_few(num_groups):
            raise ConfigError(f"outer: {fault}; plan more groups")
        if isinstance(strategy, QFedAvg) and strategy.train_loss_key != TRAIN_LOSS:
            raise ConfigError(
                f"outer = QFedAvg(train_loss_key={strategy.train_loss_key!r}), and groups "
                f"report their loss as {TRAIN_LOSS!r}; give QFedAvg(train_loss_key={TRAIN_LOSS!r}, …)"
            )

    def too_few(self, num_groups: int) -> str:
        """Return why the rule does not do what it promises with so few models; empty if it does."""
        strategy, needed = self.strategy, 1
        if isinstance(strategy, Bulyan):
            needed = 4 * strategy.num_malicious_nodes + 3
            why = f"num_malicious_nodes = {strategy.num_malicious_nodes} needs 4 · {strategy.num_malicious_nodes} + 3"
        elif isinstance(strategy, MultiKrum):
            malicious, chosen = strategy.num_malicious_nodes, strategy.num_nodes_to_select
            needed = max(2 * malicious + 3 if malicious else 1, chosen)
            why = (
                f"num_nodes_to_select = {chosen} needs"
                if needed == chosen
                else f"num_malicious_nodes = {malicious} needs 2 · {malicious} + 3"
            )
        elif isinstance(strategy, FedTrimmedAvg) and strategy.beta:
            needed = math.ceil(1 / strategy.beta)
            why = f"beta = {strategy.beta} trims nobody of fewer than"
        if num_groups >= needed:
            return ""
        separator = " = " if "+" in why else " "
        return f"{self.name}: {why}{separator}{needed} groups, and there {are_counted(num_groups, 'group')}"

    def refuse_unfit(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        num_groups: int,
        in_rings: bool,
    ) -> None:
        """Try the strategy on replies that change nothing, before clients train; `ConfigError` if that cannot be.

        A copy is tried, once, so that its own state stays as it is.
        """
        if in_rings and proximal_mu_of(self.strategy):
            raise ConfigError(
                "outer = FedProx(…): members of a ring do not add the proximal term; use it "
                "where a group trains in one process, or without groups"
            )
        trial = self._trial
        if hasattr(trial, "train_metrics_aggr_fn"):
            trial.train_metrics_aggr_fn = lambda contents, key: MetricRecord()
        sent = ConfigRecord(dict(config))
        metrics: dict[str, float] = {TRAIN_LOSS: 1.0, NUM_EXAMPLES: 1}
        trained = _parts(arrays, integers_of(arrays))[0]
        replies = [_reply(node, trained, metrics) for node in range(1, num_groups + 1)]
        try:
            with _unlogged():
                self._announce(trial, server_round, trained, sent, num_groups)
                before = dict(vars(trial))
                self._announce(trial, server_round, trained, ConfigRecord(dict(config)), num_groups)
                self._set_each_round = frozenset(
                    key for key, value in vars(trial).items() if value is not before.get(key)
                )
                made, _ = trial.aggregate_train(server_round, replies)
        except Exception as error:
            raise ConfigError(
                f"outer = {self.name}(…) cannot take groups as clients: {_one_line(error)}"
            ) from None
        if made is None or (difference := _difference(made, trained)):
            raise ConfigError(
                f"outer = {self.name}(…) makes no model of {counted(num_groups, 'group')}"
                + ("" if made is None else f": {difference}")
            )
        known = {SERVER_ROUND, *([_PROXIMAL_MU] if isinstance(trial, FedProx) else [])}
        if own := [key for key in sent if key not in known and sent[key] != config.get(key)]:
            raise ConfigError(
                f"outer = {self.name}(…) sets {own[0]!r} in the train config, which groups do "
                "not get from it; give it as train_config of start"
            )

    # ------------------------------------------------------------------------------------------------- training
    def apply(
        self,
        server_round: int,
        sent: ArrayRecord,
        replies: Sequence[Message],
        metrics: MetricRecord,
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Return the next global model and the strategy's mean of the metrics; no model if it makes none.

        `replies` are one of each group, in group order, with the tensors that were sent; `metrics` are those of a mean
        by samples. Weights are returned in the types that were sent.
        """
        samples = [num_examples_of(reply) for reply in replies]
        models = [cast(ArrayRecord, reply.content[ARRAYS]) for reply in replies]
        first, untrained = models[0], untrained_of(replies)
        parts = [_parts(model, untrained) for model in models]
        buffers = (
            aggregate_records([rest for _, rest in parts], samples)
            if parts[0][1]
            else ArrayRecord()
        )
        # Flower's sum of the same models rounds at every term.
        if self._is_mean and self._reports_means:
            trained: ArrayRecord | None = (
                aggregate_records([own for own, _ in parts], samples)
                if parts[0][0]
                else ArrayRecord()
            )
            return _joined(first, cast(ArrayRecord, trained), buffers), metrics
        common = set.intersection(*(set(_scalars(reply)) for reply in replies)) - {GROUP_ID}
        given = [
            _with_content(
                reply, own, {key: value for key, value in _scalars(reply).items() if key in common}
            )
            for reply, (own, _) in zip(replies, parts, strict=True)
        ]
        self._announce(
            self.strategy, server_round, _parts(sent, untrained)[0], ConfigRecord(), len(replies)
        )
        trained, own_metrics = self.strategy.aggregate_train(server_round, given)
        if trained is not None and self._is_mean:
            trained = aggregate_records([own for own, _ in parts], samples)
        reported = MetricRecord(dict(own_metrics or {}))
        if self._reports_means:
            reported[NUM_EXAMPLES] = int(sum(samples))
        if trained is None:
            return None, reported
        return self._as_sent(server_round, _joined(first, trained, buffers), first, sent), reported

    @property
    def _is_mean(self) -> bool:
        """Whether the strategy's model is the mean by samples, as without an outer strategy."""
        return type(self.strategy).aggregate_train is FedAvg.aggregate_train

    @property
    def _reports_means(self) -> bool:
        """Whether the strategy's metrics are Flower's means by samples."""
        default = FedAvg().train_metrics_aggr_fn
        return getattr(self.strategy, "train_metrics_aggr_fn", default) is default

    def _announce(
        self,
        strategy: Strategy,
        server_round: int,
        trained: ArrayRecord,
        config: ConfigRecord,
        num_groups: int,
    ) -> None:
        """Show the strategy the model that was sent. Its messages are not used: groups already have theirs."""
        with reproducible_draws(0):
            list(
                strategy.configure_train(
                    server_round, trained, config, cast(Grid, _Nodes(strategy, num_groups))
                )
            )

    def _as_sent(
        self, server_round: int, made: ArrayRecord, model: ArrayRecord, sent: ArrayRecord
    ) -> ArrayRecord:
        """Return the model in the types of the groups' models: Flower's steps make float64 of float32."""
        views = array_views(made)
        if difference := _difference(made, model):
            raise TrainingFailed(
                f"round {server_round}: {self.name} made another model than the groups': {difference}"
            )
        dtypes = {name: dtype for name, (dtype, _) in layout_of(model).items()}
        with np.errstate(over="ignore"):
            cast_views = {
                name: view.astype(dtypes[name], copy=False) for name, view in views.items()
            }
        if tensor := first_non_finite(cast_views, array_views(sent)):
            raise TrainingFailed(
                f"round {server_round}: {self.name} made {tensor} NaN or infinite; a smaller step of "
                "the outer strategy may help"
            )
        return to_array_record(cast_views)

    # ---------------------------------------------------------------------------------------------------- state
    def state(self) -> dict[str, NDArray[Any]]:
        """Return the strategy's moments as arrays by name, from which `restore` continues.

        They are the attributes with arrays, and the numbers that rounds have changed, without those that every round
        sets again.
        """
        kept: dict[str, NDArray[Any]] = {}
        for key, value in vars(self.strategy).items():
            if key in self._set_each_round:
                continue
            if isinstance(value, int | float) and value != self._made_with.get(key):
                kept[f"{key}/{_NUMBER}/"] = np.asarray(value)
            kept |= {f"{key}/{kind}/{name}": array for kind, name, array in _arrays_of(value)}
        return kept

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `state` returned; `ConfigError` if it is of another strategy."""
        values: dict[str, Any] = {}
        for place, array in state.items():
            key, kind, name = place.split("/", 2)
            if not hasattr(self.strategy, key) or kind not in _KINDS:
                raise ConfigError(
                    f"resume_from: outer has {key!r}, which {self.name} does not have; use the state of "
                    "the same strategy"
                )
            own = np.array(array)
            if kind in (_NUMBER, _ARRAY):
                values[key] = own.item() if kind == _NUMBER else own
            elif kind == _LIST:
                values.setdefault(key, []).append(own)
            else:
                values.setdefault(key, {})[name] = own
        records = {place.split("/", 2)[0] for place in state if place.split("/", 2)[1] == _RECORD}
        for key, value in values.items():
            setattr(
                self.strategy,
                key,
                ArrayRecord({name: Array(array) for name, array in value.items()})
                if key in records
                else value,
            )


_NUMBER, _ARRAY, _LIST, _DICT, _RECORD = _KINDS = ("number", "array", "list", "dict", "record")
"""How an attribute holds its arrays."""


def _arrays_of(value: Any) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Yield kind, name and array of all arrays in an attribute's value; nothing if it holds none."""
    if isinstance(value, np.ndarray):
        yield _ARRAY, "", value
    elif isinstance(value, ArrayRecord):
        yield from ((_RECORD, name, view) for name, view in array_views(value).items())
    elif isinstance(value, Mapping) and all(
        isinstance(each, np.ndarray) for each in value.values()
    ):
        yield from ((_DICT, str(name), array) for name, array in value.items())
    elif isinstance(value, list | tuple) and all(isinstance(each, np.ndarray) for each in value):
        yield from ((_LIST, str(index), array) for index, array in enumerate(value))


def refuse_integers_clipped(arrays: ArrayRecord) -> None:
    """Raise `ConfigError` if the model, whose updates are clipped, has integers.

    Flower's clipping scales all arrays of an update, fails on integers, and would count them in its norm.
    """
    integers = integers_of(arrays)
    if integers:
        raise ConfigError(
            f"SoCFlow: the model has {min(integers)!r}, an integer, and the strategy around SoCFlow, or a "
            "clipping_norm in train_config, clips weights only, as Flower's differential privacy does; use "
            "GroupNorm in place of BatchNorm, or start SoCFlow itself"
        )


class _Nodes:
    """What a strategy asks of a Grid for its sample: as many nodes as there are groups, or as it waits for."""

    def __init__(self, strategy: Strategy, num_groups: int) -> None:
        self._num_nodes = max(
            num_groups,
            *(int(getattr(strategy, key, 0)) for key in ("min_train_nodes", "min_available_nodes")),
        )

    def get_node_ids(self) -> list[int]:
        """Return their ids."""
        return list(range(1, self._num_nodes + 1))


class ChosenNodes(ForwardingGrid):
    """A grid that shows a strategy some of its nodes, in an order that does not depend on the engine."""

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        super().__init__(grid)
        self._node_ids = list(node_ids)

    def get_node_ids(self) -> list[int]:
        """Return the chosen nodes."""
        return list(self._node_ids)


@contextmanager
def reproducible_draws(seed: int | str) -> Iterator[None]:
    """Seed Python's global generator, from which Flower draws nodes, and restore it at the end."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep what a trial logs, such as of a sample of nodes, out of Flower's log."""
    logger = logging.getLogger("flwr")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _parts(model: ArrayRecord, untrained: frozenset[str]) -> tuple[ArrayRecord, ArrayRecord]:
    """Return what trains, and the rest; arrays are shared with the model."""
    return (
        ArrayRecord({name: array for name, array in model.items() if name not in untrained}),
        ArrayRecord({name: array for name, array in model.items() if name in untrained}),
    )


def _joined(like: ArrayRecord, trained: ArrayRecord, buffers: ArrayRecord) -> ArrayRecord:
    """Return both in the order of a model; tensors that the model lacks come last."""
    both = {**trained, **buffers}
    return ArrayRecord(
        {
            name: both[name]
            for name in (
                *(name for name in like if name in both),
                *(name for name in both if name not in like),
            )
        }
    )


def _difference(made: ArrayRecord, model: ArrayRecord) -> str:
    """Return the first difference in names and shapes; types may differ."""
    own, expected = layout_of(made), layout_of(model)
    in_its_types = {
        name: (expected.get(name, (dtype, ()))[0], shape) for name, (dtype, shape) in own.items()
    }
    return layout_difference(in_its_types, expected)


def _metrics(reply: Message) -> MetricRecord:
    return cast(MetricRecord, reply.content[METRICS])


def _scalars(reply: Message) -> dict[str, int | float]:
    return {key: value for key, value in _metrics(reply).items() if isinstance(value, int | float)}


def _with_content(
    reply: Message, model: ArrayRecord, metrics: Mapping[str, int | float]
) -> Message:
    """Return the reply with nothing but a model and metrics."""
    given = copy.copy(reply)
    given.content = RecordDict({ARRAYS: model, METRICS: MetricRecord(dict(metrics))})
    return given


def _reply(node: int, model: ArrayRecord, metrics: Mapping[str, int | float]) -> Message:
    content = RecordDict({ARRAYS: ArrayRecord(dict(model)), METRICS: MetricRecord(dict(metrics))})
    return Message(content, reply_to=Message(RecordDict(), node, MessageType.TRAIN))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
