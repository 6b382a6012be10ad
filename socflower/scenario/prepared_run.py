"""A scenario with the objects built from it: checked before anything starts, and run with the same objects."""

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from socflower.cluster import Cluster
from socflower.cluster.device_memory import require_training_memory
from socflower.engines.names import require_engine
from socflower.errors import ConfigError, InfeasiblePlan
from socflower.hierarchy.exchange.models import NONE
from socflower.precision import Int8Model
from socflower.precision.int8.network import UnsupportedOperator
from socflower.scenario.costs import (
    check_names,
    model_profile,
    num_samples,
    optimizer_copies,
    pricing,
)
from socflower.scenario.heat import check_boards
from socflower.scenario.planning import group_work
from socflower.scenario.schema.config import INSIDE_GROUPS_OR_FIRST, several_groups
from socflower.scenario.schema.file import num_participants, scenario_cluster
from socflower.scenario.schema.key_rules import is_set
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.split_setting import SplitSetting
from socflower.strategies.presets import group_strategy
from socflower.workloads.sources import data_names, load_data
from socflower.workloads.weights_file import read_weights

# Checks that need no torch come first: importing it takes longer than all of them.
if TYPE_CHECKING:
    from torch import nn


class PreparedRun:
    """One run of a scenario. Its objects are built on first use, and only once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._model: nn.Module | None = None

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster of the scenario."""
        return scenario_cluster(self.scenario)

    @cached_property
    def split_setting(self) -> SplitSetting:
        """The edges and the cloud of a split scenario."""
        return SplitSetting(self.scenario)

    def take_model(self) -> "nn.Module":
        """Return the model with initial weights and give up ownership; a second call builds a new model."""
        from socflower.scenario.workload import initial_model

        model, self._model = self._model, None
        return initial_model(self.scenario) if model is None else model

    def check(self, engine: str, *, trains_here: bool = True) -> None:
        """Raise a one-line error if the scenario cannot run: engine, device, data, model, SoCs, groups, events.

        If `trains_here` is false another machine trains, and its data and kernels can be checked only there.
        """
        scenario = self.scenario
        require_engine(engine)
        if scenario.pipeline is not None and scenario.pipeline.sample:
            why = "there are no data to train on; give [data] instead, or use `socflower plan`"
            raise scenario.mistake("pipeline", "sample", why)
        if scenario.model.pretrained:
            _check_pretrained(scenario, trains_here)
        num_socs = num_participants(scenario, self.cluster)
        check_boards(scenario, self.cluster)
        if scenario.kind.uses_cloud:
            _check_shared(scenario, engine)
            if engine == "deployment":
                require_given_codec(scenario)
            if trains_here:
                self._check_split()
        else:
            _check_streaming(scenario, engine)
            self._check_groups(num_socs)
            check_names(scenario)
            if trains_here and not scenario.factories:
                self._check_memory(num_socs)
        if trains_here:
            self._check_here(num_socs)

    def _check_here(self, num_socs: int) -> None:
        """Raise if data, device, kernels, or a model or data of the user's do not allow to train on this machine."""
        scenario = self.scenario
        # All other data of split training are made from a seed.
        if scenario.data.name in data_names() and not scenario.data.factory:
            load_data(scenario.data.name)
        from socflower.model_graph.torch_device import resolve_device

        resolve_device(scenario.train.device, f"{scenario.name} [train] device")
        if scenario.kind.uses_cloud:
            if scenario.precision.arithmetic != "fp32":
                self._check_int8_front()
            return
        if scenario.factories:
            from socflower.scenario.workload import check_workload

            check_workload(scenario)
            self._check_memory(num_socs)
            # A model of the user's may have layers that cannot be profiled.
            model_profile(scenario)
        if scenario.model.pretrained and self._model is None:
            from socflower.scenario.workload import initial_model

            # This refuses weights of another model.
            self._model = initial_model(scenario)
        if scenario.precision.arithmetic != "fp32":
            self._check_int8()

    def _check_split(self) -> None:
        """Raise if model, data, cuts and links do not fit together."""
        setting = self.split_setting
        setting.parties()
        if self.scenario.split.loss_budget:
            # It raises if the training is too short for its trials.
            _ = setting.trial_plan
        if self.scenario.split.cloud_processors is not None and setting.is_joined:
            why = "parties share the cloud's half; leave it out"
            raise self.scenario.mistake("edgecloud", "cloud_processors", why)

    def _check_groups(self, num_socs: int) -> None:
        scenario = self.scenario
        groups = scenario.strategy.groups
        reads_groups = "groups" not in scenario.kind.unread_keys
        if reads_groups and isinstance(groups, int) and groups > num_socs:
            raise InfeasiblePlan(
                f"{scenario.name} [strategy] groups = {groups}, but only {num_socs} SoCs take part; use "
                "fewer"
            )
        if scenario.strategy.use_spares:
            self._check_spares(num_socs)
        kind = scenario.kind
        is_alone = groups == num_socs and several_groups(scenario.strategy.name)
        is_alone |= groups == "auto" and kind.is_alone
        unread = () if kind.is_synchronous_first else INSIDE_GROUPS_OR_FIRST
        for key in ("exchange", "compression", *unread):
            if is_alone and is_set(scenario.strategy, key):
                why = "each group has one SoC, which exchanges no gradients; leave it out"
                raise scenario.mistake("strategy", key, why)
        if scenario.precision.arithmetic == "int8" and scenario.kind.has_groups:
            _check_int8_exchange(scenario)
        last = self.cluster.num_socs - 1
        for event in scenario.events:
            if event.soc > last:
                raise ConfigError(
                    f"{scenario.name} [[event]] soc = {event.soc}, but SoCs are 0 to {last}"
                )

    def _check_spares(self, num_socs: int) -> None:
        """Raise if every SoC of the cluster takes part."""
        num_training = group_strategy(self.scenario.strategy.name).num_socs or num_socs
        if num_training == self.cluster.num_socs:
            why = "all SoCs of the cluster take part, and none is spare; give socs, or leave it out"
            raise self.scenario.mistake("strategy", "use_spares", why)

    def _check_memory(self, num_socs: int) -> None:
        """Raise for a device with too little memory for its part of a step; pipelines are planned within it."""
        scenario = self.scenario
        if scenario.kind.has_groups:
            group_work(scenario, self.cluster)
        elif not scenario.kind.is_pipeline:
            share = min(scenario.train.batch_size, math.ceil(num_samples(scenario) / num_socs))
            require_training_memory(
                self.cluster,
                model_profile(scenario),
                dict.fromkeys(range(num_socs), share),
                pricing=pricing(scenario),
                optimizer_copies=optimizer_copies(scenario),
            )

    def _check_int8(self) -> None:
        """Raise if int8 cannot train the scenario's model, or this machine lacks the kernel path."""
        from socflower.scenario.workload import initial_model

        if self._model is None:
            self._model = initial_model(self.scenario)
        self._read_in_int8(self._model, "or arithmetic = 'fp32'")

    def _read_in_int8(self, model: "nn.Module", instead: str, *, head: bool = True) -> None:
        """Raise if int8 lacks an operator of a model; `instead` is another remedy than running it in FP32."""
        from socflower.scenario.arithmetic import unsupported
        from socflower.scenario.workload import image_shape

        scenario = self.scenario
        try:
            Int8Model.from_module(
                model,
                input_shape=image_shape(scenario),
                head=head,
                fp32_operators=scenario.precision.fp32_operators,
                unsupported=unsupported(scenario),
            )
        except UnsupportedOperator as error:
            why = f"{error.what}; set [precision] unsupported = 'fp32', {instead}"
            raise scenario.mistake("model", "name", why) from None

    def _check_int8_front(self) -> None:
        """Raise if int8 cannot train the edges' layers, also after the cut has moved."""
        from socflower.edgecloud.split_program import LayeredProgram

        scenario, program = self.scenario, self.split_setting.workload.program
        assert isinstance(program, LayeredProgram)
        split, moves = program.split, self.split_setting.can_move_cuts
        cuts = [party.split_plan.cut for party in self.split_setting.parties()]
        # The cut may move to any place, so the longest front half must be trainable.
        if None in cuts or (moves and scenario.split.allow_edge_only):
            last = split.num_cuts
        elif moves:
            last = split.num_cuts - 1
        else:
            last = max(cut for cut in cuts if cut is not None)
        self._read_in_int8(
            split.front(last),
            "or an [edgecloud] cut before it with adapt = false",
            head=last == split.num_cuts,
        )


def prepare(scenario: Scenario, engine: str = "local", *, trains_here: bool = True) -> PreparedRun:
    """Check a scenario and return its run; see `PreparedRun.check`."""
    run = PreparedRun(scenario)
    run.check(engine, trains_here=trains_here)
    return run


def _check_pretrained(scenario: Scenario, trains_here: bool) -> None:
    """Raise for weights that cannot be read, or that other machines do not have."""
    if not trains_here:
        why = "the file is on this machine, and the machines of a SuperLink train; leave it out"
        raise scenario.mistake("model", "pretrained", why)
    try:
        read_weights(Path(scenario.model.pretrained))
    except ConfigError as error:
        raise ConfigError(f"{scenario.name} [model] pretrained: {error}") from None


def _check_int8_exchange(scenario: Scenario) -> None:
    """Raise for settings that the exchange of integer gradients does not have."""
    if scenario.exchange.compression != NONE:
        key = "name" if scenario.strategy.compression == NONE else "compression"
        why = "arithmetic = 'int8' sums its gradients exactly; leave it out, or use 'mixed'"
        raise scenario.mistake("strategy", key, why)
    if scenario.strategy.overlap_buckets > 1:
        # Members agree on the scale of each tensor only once its whole gradient is there.
        why = "gradients in int8 are exchanged after the backward pass; leave it out"
        raise scenario.mistake("strategy", "overlap_buckets", why)


def _check_streaming(scenario: Scenario, engine: str) -> None:
    """Raise for what fragments of real machines, which meet at the hub, would not do."""
    strategy = scenario.strategy
    if engine != "deployment" or not strategy.kind.is_streaming:
        return
    for key, plain in (("leaders", ("auto", "star")), ("leader_compression", (NONE,))):
        if getattr(strategy, key) not in plain:
            why = "in a deployment fragments meet at the hub as they are; leave it out"
            raise scenario.mistake("strategy", key, why)


def require_given_codec(scenario: Scenario) -> None:
    """Raise for K and bits that are to be calibrated, which is for training in virtual time."""
    for key in scenario.split.calibrated:
        why = "a cloud on a machine of its own trains with what is given; calibrate with --engine local, and give it"
        raise scenario.mistake("edgecloud", key, why)


def _check_shared(scenario: Scenario, engine: str) -> None:
    """Raise for what edges share in virtual time only, if they are to be real."""
    for key in ("shared_bytes_per_s", "cloud_processors"):
        if engine == "deployment" and getattr(scenario.split, key) is not None:
            why = "it is of virtual time, and a deployment has its own; leave it out"
            raise scenario.mistake("edgecloud", key, why)
