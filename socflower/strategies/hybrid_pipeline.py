"""HybridPipeline: one model over unequal devices, in stages that are cut and shared by predicted time (Asteroid)."""

from socflower.cluster import FP32, VirtualClock, sustained_rates
from socflower.errors import ConfigError, require_range, require_type
from socflower.hierarchy import Rebalancing
from socflower.hierarchy.exchange.models import STAR
from socflower.hierarchy.plan import plan_of_socs
from socflower.peers.ring.settings import RingSettings
from socflower.pipeline.plan import Plan
from socflower.pipeline.planner.selection import Planned, PlannerSettings
from socflower.pipeline.problem import PipelineProblem
from socflower.pipeline.profiler.estimates import default_micro_batches
from socflower.pipeline.runtime.payloads import EXACT, ActivationCoding
from socflower.plain_numbers import plain_numbers
from socflower.strategies.methods.groups import GroupsMethod
from socflower.strategies.methods.pipeline import PipelineWork
from socflower.strategies.round_planner import RoundPlanner
from socflower.strategies.settings import ExchangeSettings, TrainingSchedule
from socflower.strategies.socflow import GroupRoundStrategy, sync_plan_of


@plain_numbers
class HybridPipeline(GroupRoundStrategy):
    """Synchronous SGD of one model that is cut into stages over unequal devices.

    Devices of a stage share the samples of every micro-batch; stages pass activations and their gradients on. The plan
    is that of the least predicted time within the devices' memory; it may be one device, or data parallelism. A round
    is an interval of the schedule, after which the model is evaluated. Devices that leave, or come back, between rounds
    change the plan; the optimiser's state stays with its layers.

    On the engines `local` and `simulation` the client of one node runs all stages. Nodes with a ring address run a
    stage each, over gloo or gRPC, and continue without one that is lost, from the newest step whose parts the others
    have.

    Parameters
    ----------
    problem : PipelineProblem
        Model, devices and mini-batch, as `pipeline_problem(model, example, cluster, batch_size=…)` describes them. With
        `int8_socs=…` it says whose stages compute in int8: planned, priced and trained so.
    schedule : TrainingSchedule
        How much is trained. `batch_size` is the problem's mini-batch, and `reshuffle` stays True.
    planner : PlannerSettings, optional
        How far the planner looks, and where samples are; by default at micro-batches of a 4th to a 32nd of the batch.
    plan : PipelinePlan or TwoDPlan, optional
        A plan of yours instead, as long as all its devices are there.
    coding : ActivationCoding
        In how many bits activations and their gradients cross a cut.
    rings : RingSettings
        Real machines: how long devices may be silent or absent, and the transport; gradients are float32.
    backup_steps : int
        Real machines: after how many updates a stage that is on one device alone is copied to the next one's device;
        0: once a round. More often costs their bytes, and less is done again after a loss.
    clock : VirtualClock, optional
        By default that of the grid, if it has one.
    rebalancing : Rebalancing, optional
        Follow the devices' speeds, as of `SoCFlow`: with shares, replicated stages divide micro-batches again within a
        round; with groups, rounds are planned again for speeds that real machines have measured, or the clock knows.
    tolerate_client_errors : bool
        As of `SoCFlow`.
    """

    def __init__(
        self,
        *,
        problem: PipelineProblem,
        schedule: TrainingSchedule,
        planner: PlannerSettings | None = None,
        plan: Plan | None = None,
        coding: ActivationCoding = EXACT,
        clock: VirtualClock | None = None,
        rings: RingSettings = RingSettings(),
        backup_steps: int = 0,
        rebalancing: Rebalancing | None = None,
        tolerate_client_errors: bool = False,
    ) -> None:
        name = type(self).__name__
        of_model = "a PipelineProblem, as of pipeline_problem(model, …)"
        require_type(name, (PipelineProblem,), of_model, problem=problem)
        require_type(name, (TrainingSchedule,), "TrainingSchedule(…)", schedule=schedule)
        require_type(name, (ActivationCoding,), "ActivationCoding(…)", coding=coding)
        require_type(name, (RingSettings,), "RingSettings(…)", rings=rings)
        require_type(name, (int,), "a whole number, 0 or more", backup_steps=backup_steps)
        require_range(name, least=0, backup_steps=backup_steps)
        _check_schedule(name, schedule, problem)
        cluster = problem.cluster
        socs = {device.soc for device in problem.devices}
        plan_of_all = plan_of_socs(cluster, 1, (1.0,) * cluster.num_socs, socs)
        planner_of_rounds = RoundPlanner(
            cluster, plan_of_all, sustained_rates(cluster, "", FP32), rebalancing
        )
        micro_batches = default_micro_batches(schedule.batch_size)
        self._work = PipelineWork(
            problem=problem,
            planner=planner or PlannerSettings(micro_batch_sizes=micro_batches),
            plan=plan,
            coding=coding,
            backup_steps=backup_steps,
            rebalancing=rebalancing,
            in_use=planner_of_rounds.balancer.in_use,
            clock=clock,
        )
        method = GroupsMethod(
            sync=sync_plan_of(schedule, ExchangeSettings(leaders=STAR), 1),
            planner=planner_of_rounds,
            work=self._work,
            rings=rings,
            tolerate_client_errors=tolerate_client_errors,
        )
        super().__init__(method)
        # What fits nowhere is an error before anything starts.
        self._work.planned_for(plan_of_all.participants)

    @property
    def pipeline(self) -> Planned:
        """The plan of the latest round, with its prediction."""
        return self._work.planned_for(self.plan.participants)

    def undisturbed_s(self) -> float:
        """Return the virtual seconds of all rounds on all devices without heat, users and events."""
        return self._work.undisturbed_s(self.plan.participants, self.method.sync.intervals)


def _check_schedule(name: str, schedule: TrainingSchedule, problem: PipelineProblem) -> None:
    """Raise `ConfigError` for a schedule of other mini-batches than the problem's, or of data that stay."""
    if schedule.batch_size != problem.mini_batch_size:
        raise ConfigError(
            f"{name}: the schedule has batch_size = {schedule.batch_size}, and mini-batches of the "
            f"problem have {problem.mini_batch_size} samples; give both the same"
        )
    if not schedule.reshuffle:
        raise ConfigError(
            f"{name}: all samples of a mini-batch come from one place, so data cannot stay at their "
            "nodes; use reshuffle=True"
        )
