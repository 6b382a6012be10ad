"""The ServerApp of a scenario without a cloud: builds model, data, strategy and clock, and returns the outcome."""

from collections.abc import Collection
from importlib import import_module
from logging import WARNING
from time import perf_counter
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import Strategy as OuterStrategy
from flwr.supercore import log

from socflower.engines.checkpoint import Checkpoint
from socflower.engines.local.virtual_time_grid import VirtualTimeGrid
from socflower.engines.run_folder import RunFolder
from socflower.engines.trained_devices import TrainedDevices
from socflower.errors import ConfigError, InfeasiblePlan, TrainingFailed
from socflower.hierarchy import default_candidates
from socflower.hierarchy.exchange.collectives import BUCKETS
from socflower.pipeline.planner.selection import PlannerSettings
from socflower.pipeline.runtime.payloads import ActivationCoding
from socflower.scenario.app.round_record import RoundRecord, event_documents
from socflower.scenario.arithmetic import (
    evaluation_device,
    kernels,
    model_profile,
    num_training_samples,
    pricing,
)
from socflower.scenario.heat import heat_document, rack_dynamics, unthrottled_training_s
from socflower.scenario.pipeline_planning import (
    micro_batch_sizes,
    pipeline_problem,
    planned_document,
)
from socflower.scenario.planning import rebalancing
from socflower.scenario.prepared_run import PreparedRun
from socflower.scenario.priced_processors import priced_line, priced_processors
from socflower.scenario.schema.outer import OUTER_STRATEGIES, OuterConfig
from socflower.scenario.schema.pipeline import PipelineConfig
from socflower.scenario.schema.strategies import group_strategy
from socflower.scenario.workload import ModelMetrics, scenario_data
from socflower.sim import EventClock, Trace
from socflower.strategies.baselines import OrderedFedAvg
from socflower.strategies.hybrid_pipeline import HybridPipeline
from socflower.strategies.settings import Costs, ExchangeSettings, Grouping, TrainingSchedule
from socflower.strategies.socflow import SoCFlow
from socflower.strategies.warm_up import profile_group_count
from socflower.training.model_state import (
    frozen_digest,
    load_trainable_state,
    num_bytes_of,
    trainable_state,
)
from socflower.wire.message_keys import FROZEN_SHA256, TRAIN_LOSS
from socflower.workloads import evaluate


def train(run: PreparedRun, grid: Grid, folder: RunFolder) -> dict[str, Any]:
    """Train and return the outcome: the part of the result document that does not depend on the caller."""
    return _Training(run, grid, folder).run()


class _Training:
    """One run; each round's record is collected at its evaluation, after training and the clock's advance."""

    def __init__(self, run: PreparedRun, grid: Grid, folder: RunFolder) -> None:
        self._scenario = scenario = run.scenario
        self._grid = self._devices = TrainedDevices(grid)
        self._folder = folder
        self._cluster = run.cluster
        self._data = scenario_data(scenario)
        self._num_samples = num_training_samples(scenario, len(self._data.train))
        self._model = run.take_model()
        folder.require_room_for_model(num_bytes_of(self._model))
        # Frozen parameters stay at the nodes, which make them by the model's function and compare the digest.
        self._frozen = {FROZEN_SHA256: digest} if (digest := frozen_digest(self._model)) else {}
        self._profile = model_profile(scenario, self._model)
        self._trace = Trace()
        self._rack = rack_dynamics(scenario, self._cluster)
        self._clock = EventClock(self._cluster, dynamics=self._rack, trace=self._trace)
        self._record = RoundRecord(
            scenario, folder, self._clock, self._trace, self._devices, self._evaluate
        )
        self._plan: dict[str, Any] | None = None
        self._resumed: Checkpoint | None = None
        self._transport, self._leader_transport = "in process", ""
        # The time of a pipeline without heat.
        self._undisturbed_s: float | None = None

    def run(self) -> dict[str, Any]:
        """Train with the scenario's strategy."""
        started_s = perf_counter()
        arrays = ArrayRecord(trainable_state(self._model))
        resumed = self._record.resume()
        if resumed is not None:
            self._resumed, arrays = resumed
        if self._scenario.is_pipeline:
            final = self._pipelined(arrays)
        else:
            final = self._grouped(arrays) if self._scenario.has_groups else self._fedavg(arrays)
        if self._resumed is not None:
            # A resumed run may have no round left.
            final = final or arrays
        if not final:
            raise TrainingFailed(
                "Flower returned no model: every client failed; see the log for the first cause"
            )
        if line := priced_line(priced_processors(self._scenario, self._devices.document())):
            log(WARNING, "time and energy are those of %s", line)
        return {
            "strategy": self._scenario.strategy.name,
            "kernels": kernels(self._scenario),
            "transports": {
                "inside groups": self._transport,
                "hub": "Flower messages",
                **({"between leaders": self._leader_transport} if self._leader_transport else {}),
            },
            "data_source": self._data.source,
            **self._record.totals(final, self._whole(final)),
            "wall_s": perf_counter() - started_s,
            "heat": self._heat_document(),
            "plan": self._plan,
        }

    def _heat_document(self) -> dict[str, Any] | None:
        if self._rack is None:
            return None
        return heat_document(
            self._scenario,
            self._rack,
            self._clock.now_s,
            unthrottled_training_s(self._scenario, self._cluster)
            if self._undisturbed_s is None
            else self._undisturbed_s,
        )

    def _grouped(self, arrays: ArrayRecord) -> ArrayRecord:
        strategy = self._strategy(self._num_groups(arrays), self._scenario.train.epochs)
        self._plan = {**strategy.plan.to_document(), **strategy.method.exchanges.to_document()}
        self._require_reachable_events(strategy.num_rounds, strategy.plan.participants)

        def round_end(server_round: int) -> dict[str, Any]:
            report = strategy.reports[-1]
            return {
                "epoch": report.epoch,
                "events": event_documents(report.events),
                "uplink_turns": report.uplink_turns,
                **_mixed(report.alpha, report.cpu_share),
            }

        if self._resumed is not None:
            strategy.resume_from(
                self._resumed.server_round,
                **{key: getattr(self._resumed, key) for key in strategy.state},
            )
        final = strategy.start(
            self._grid,
            arrays,
            num_rounds=strategy.num_rounds,
            timeout=self._scenario.train.reply_timeout_s,
            train_config=self._train_config(),
            evaluate_fn=self._record.evaluation(
                round_end, strategy.num_rounds, lambda: strategy.state, self._heat
            ),
        ).arrays
        self._transport, self._leader_transport = (
            strategy.method.transport,
            strategy.method.leader_transport,
        )
        return final

    def _train_config(self) -> ConfigRecord:
        return ConfigRecord({**self._frozen, **self._record.train_config})

    def _pipelined(self, arrays: ArrayRecord) -> ArrayRecord:
        """Train one model over all SoCs, in stages."""
        settings, table = self._scenario.strategy, self._scenario.pipeline or PipelineConfig()
        if settings.rebalance == "shares" and self._rack is not None:
            why = "in virtual time a pipeline keeps its shares within a round; use 'groups'"
            raise self._scenario.mistake("strategy", "rebalance", why)
        problem, _ = pipeline_problem(self._scenario)
        strategy = HybridPipeline(
            problem=problem,
            planner=PlannerSettings(micro_batch_sizes=tuple(micro_batch_sizes(self._scenario))),
            schedule=TrainingSchedule(
                num_samples=self._num_samples,
                batch_size=self._scenario.train.batch_size,
                num_epochs=self._scenario.train.epochs,
                seed=self._scenario.seed,
                interval_epochs=1.0
                if isinstance(settings.sync_interval_epochs, str)
                else min(1.0, settings.sync_interval_epochs),
            ),
            coding=ActivationCoding(
                bits=table.activation_bits,
                gradient_bits=table.gradient_bits,
                feedback=table.activation_feedback,
            ),
            rings=self._scenario.ring,
            backup_steps=table.backup_steps,
            rebalancing=rebalancing(self._scenario),
            clock=self._clock,
            tolerate_client_errors=settings.tolerate_client_errors,
        )
        self._plan = planned_document(strategy.pipeline)
        self._undisturbed_s = strategy.undisturbed_s() if self._rack is not None else None
        self._require_reachable_events(strategy.num_rounds, strategy.plan.participants)

        def round_end(server_round: int) -> dict[str, Any]:
            report = strategy.reports[-1]
            return {"epoch": report.epoch, "events": event_documents(report.events)}

        if self._resumed is not None:
            strategy.resume_from(
                self._resumed.server_round,
                **{key: getattr(self._resumed, key) for key in strategy.state},
            )
        final = strategy.start(
            self._grid,
            arrays,
            num_rounds=strategy.num_rounds,
            timeout=self._scenario.train.reply_timeout_s,
            train_config=self._train_config(),
            evaluate_fn=self._record.evaluation(
                round_end, strategy.num_rounds, lambda: strategy.state, self._heat
            ),
        ).arrays
        self._transport = strategy.method.transport
        return final

    def _num_groups(self, arrays: ArrayRecord) -> int:
        settings = self._scenario.strategy
        fixed = group_strategy(settings.name).num_groups
        if fixed is not None:
            return fixed
        if isinstance(settings.groups, int):
            return settings.groups
        # A resumed run has its warm-up in the checkpoint.
        if self._record.warm_up is not None:
            return int(self._record.warm_up["num_groups"])
        num_socs = settings.socs or self._cluster.num_socs
        choice = profile_group_count(
            self._grid,
            arrays,
            self._first_epoch_score,
            lambda num_groups: self._strategy(num_groups, num_epochs=1),
            default_candidates(num_socs),
            timeout_s=self._scenario.train.reply_timeout_s,
            train_config=self._frozen,
        )
        self._record.warm_up = {
            "num_groups": choice.num_groups,
            "stopped_at": choice.stopped_at,
            "virtual_s": self._clock.now_s,
            "energy_j": self._clock.usage.total_energy_j,
            "first_epoch_accuracy": {str(key): value for key, value in choice.accuracies.items()},
        }
        return int(choice.num_groups)

    def _first_epoch_score(self, arrays: ArrayRecord) -> float:
        """Return the accuracy by which the number of groups is chosen; without one, exp(-loss)."""
        score = self._evaluate(arrays)
        if score.accuracy is None and score.likelihood == 0.0:
            raise TrainingFailed(
                f'[strategy] groups = "auto": a loss of {score.loss:g} after the first epoch is too large '
                "to compare by; give a number of groups"
            )
        return score.likelihood if score.accuracy is None else score.accuracy

    def _strategy(self, num_groups: int, num_epochs: int) -> SoCFlow:
        settings = self._scenario.strategy
        kind = group_strategy(settings.name)
        module, _, name = kind.target.partition(":")
        strategy: type[SoCFlow] = getattr(import_module(module), name)
        return strategy(
            cluster=self._cluster,
            groups=Grouping(num_groups=num_groups, num_socs=kind.num_socs or settings.socs),
            schedule=TrainingSchedule(
                num_samples=self._num_samples,
                batch_size=self._scenario.train.batch_size,
                num_epochs=num_epochs,
                interval_epochs=kind.sync_interval_epochs(settings.sync_interval_epochs),
                server_interval=kind.server_interval(settings.server_interval),
                reshuffle=settings.reshuffle,
                seed=self._scenario.seed,
            ),
            costs=Costs(
                model_profile=self._profile, pricing=pricing(self._scenario), clock=self._clock
            ),
            exchange=ExchangeSettings(
                uplink_turns=settings.uplink_turns,
                overlap_buckets=settings.overlap_buckets,
                compression=settings.compression,
                leaders=self._scenario.leaders,
                leader_compression=settings.leader_compression,
                fusion=settings.fusion,
            ),
            rings=self._scenario.ring,
            rebalancing=rebalancing(self._scenario),
            outer=None if settings.outer is None else _outer(settings.outer),
            tolerate_client_errors=settings.tolerate_client_errors,
        )

    def _fedavg(self, arrays: ArrayRecord) -> ArrayRecord:
        """Train with Flower's FedAvg over all nodes, summed in node order; the grid prices its messages."""
        settings = self._scenario.train
        num_rounds = settings.epochs // settings.local_epochs
        num_socs, wanted = (
            len(list(self._grid.get_node_ids())),
            self._scenario.strategy.socs or self._cluster.num_socs,
        )
        if num_socs != wanted:
            raise InfeasiblePlan(
                f"[strategy] fedavg trains on {wanted} SoCs and Flower has {num_socs} nodes; set socs = "
                f"{num_socs}"
            )
        self._require_reachable_events(num_rounds, range(num_socs))
        grid = VirtualTimeGrid(
            self._grid,
            self._clock,
            self._cluster,
            model_profile=self._profile,
            batch_size=settings.batch_size,
            pricing=pricing(self._scenario),
            fused=self._scenario.strategy.fusion == BUCKETS,
        )
        strategy = OrderedFedAvg(
            fraction_evaluate=0.0, min_train_nodes=num_socs, min_available_nodes=num_socs
        )
        config = ConfigRecord(
            {
                "batch-size": settings.batch_size,
                "local-epochs": settings.local_epochs,
                "num-rounds": num_rounds,
                "seed": self._scenario.seed + 1,
                **self._frozen,
            }
        )

        def round_end(server_round: int) -> dict[str, Any]:
            return {
                "epoch": float(server_round * settings.local_epochs),
                "events": event_documents(strategy.events),
                **_mixed(strategy.alpha, strategy.cpu_share),
            }

        if self._resumed is not None:
            strategy.resume_from(self._resumed.server_round)
        return strategy.start(
            grid,
            arrays,
            num_rounds=num_rounds,
            timeout=settings.reply_timeout_s,
            train_config=config,
            evaluate_fn=self._record.evaluation(round_end, num_rounds, extra_figures=self._heat),
        ).arrays

    def _require_reachable_events(self, num_rounds: int, socs: Collection[int]) -> None:
        """Raise `ConfigError` for an event that can never happen, since the scenario would not test its claim."""
        taking_part = ", ".join(map(str, socs))
        for event in self._scenario.events:
            if event.round > num_rounds:
                raise ConfigError(
                    f"[[event]] round = {event.round}, but the run has {num_rounds} rounds"
                )
            if event.soc not in socs:
                raise ConfigError(
                    f"[[event]] soc = {event.soc} takes no part; use one of {taking_part}"
                )

    def _heat(self) -> dict[str, float]:
        """Return the rack's temperature, clock and fan speed at a round's end, if the scenario simulates heat."""
        if self._rack is None or self._scenario.thermal is None:
            return {}
        now = self._rack.present
        return {"hottest_c": now.hottest_c, "mean_clock": now.mean_clock, "fan_rpm": now.rpm}

    def _whole(self, final: ArrayRecord) -> ArrayRecord:
        """Return the trained model with its frozen parameters."""
        if not self._frozen:
            return final
        load_trainable_state(self._model, final.to_torch_state_dict())
        return ArrayRecord(self._model.state_dict())

    def _evaluate(self, arrays: ArrayRecord) -> ModelMetrics:
        load_trainable_state(self._model, arrays.to_torch_state_dict())
        evaluation = evaluate(
            self._model, self._data.test, device=evaluation_device(self._scenario)
        )
        return ModelMetrics(evaluation.metrics.get("accuracy"), evaluation.loss)


def _outer(settings: OuterConfig) -> OuterStrategy:
    """Return the outer strategy; nodes do not evaluate, as a scenario is evaluated on the server."""
    more = {"train_loss_key": TRAIN_LOSS} if settings.name == "qfedavg" else {}
    outer: OuterStrategy = getattr(flower_strategies, OUTER_STRATEGIES[settings.name][0])(
        **settings.arguments, **more, fraction_evaluate=0.0
    )
    return outer


def _mixed(alpha: float | None, cpu_share: float | None) -> dict[str, float]:
    """Return the extra figures of a round of mixed precision."""
    return {
        key: value
        for key, value in (("alpha", alpha), ("cpu_share", cpu_share))
        if value is not None
    }
