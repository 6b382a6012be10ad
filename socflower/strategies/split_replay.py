"""Split training as a Flower strategy: edges train the front of a model, a cloud the back (F22-F27)."""

from collections.abc import Callable, Collection, Sequence

from socflower.cluster import Cluster
from socflower.edgecloud.links.bandwidth_profile import BandwidthProfile
from socflower.edgecloud.plan.party import CloudMode, Party
from socflower.plain_numbers import plain_numbers
from socflower.sim import EventClock
from socflower.strategies.methods.split import (
    CloudSessions,
    SettledSplit,
    SplitMethod,
    SplitRound,
)
from socflower.strategies.methods.split_report import SplitRoundReport
from socflower.strategies.round_strategy import RoundStrategy
from socflower.wire.split_message_keys import OWN


@plain_numbers
class SplitReplay(RoundStrategy[SplitRound, SettledSplit]):
    """Train a model with its front half at edges and its back half in a cloud, pipelined.

    A round is a span of batches. Without `cloud`, both halves train in the client's process, in the order of the
    simulated schedule: the staleness of each gradient follows from costs and link, and equal seeds give equal weights.
    With `cloud`, edges connect to it, and gradients are applied as they arrive.

    Parameters
    ----------
    cluster : Cluster
        Its first SoCs are the edges, one for each of `parties`.
    parties : sequence of Party
        For each edge, the cost of a batch at every cut, its link, its initial split plan, the engine that may move its
        cut, and the batches for which it is away (`socflower.edgecloud`): the others train them without it.
    mode : "own", "turns" or "joined"
        "own": each edge has its own cloud half, and all halves are averaged after each round (SplitFed). "turns": one
        cloud half trains on the edges' batches in turn. "joined": edges hold different features of the same samples,
        which the cloud concatenates.
    edge_names : (party, cut) -> names
        The tensors that an edge holds; None is the cut of an edge that holds the whole model.
    batches_per_epoch, num_epochs, round_epochs, seed
        A round is `round_epochs` epochs, rounded to batches, or ends at each of the epochs given.
    reverse : bool
        The front half is in the cloud: generative models, whose last layers see the data.
    uplink, cloud_processors
        What edges share in virtual time; see `socflower.edgecloud.plan.split_pipeline.simulate_split`.
    clock : EventClock, optional
        Of the same cluster; each round is simulated on it. Default: the grid's, else one of its own.
    cloud : CloudSessions, optional
        The cloud, on real machines.
    trial : str
        If several strategies train the first batches on the same nodes and one of them continues, a name for each.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        parties: Sequence[Party],
        edge_names: Callable[[int, int | None], Collection[str]],
        batches_per_epoch: int,
        num_epochs: int,
        mode: CloudMode = OWN,
        reverse: bool = False,
        round_epochs: float | Sequence[float] = 1.0,
        seed: int = 1,
        fingerprint: str = "",
        clock: EventClock | None = None,
        cloud: CloudSessions | None = None,
        tolerate_client_errors: bool = False,
        uplink: BandwidthProfile | None = None,
        cloud_processors: int | None = None,
        trial: str = "",
    ) -> None:
        super().__init__(
            SplitMethod(
                cluster=cluster,
                parties=parties,
                edge_names=edge_names,
                batches_per_epoch=batches_per_epoch,
                num_epochs=num_epochs,
                mode=mode,
                reverse=reverse,
                round_epochs=round_epochs,
                seed=seed,
                fingerprint=fingerprint,
                clock=clock,
                cloud=cloud,
                tolerate_client_errors=tolerate_client_errors,
                uplink=uplink,
                cloud_processors=cloud_processors,
                trial=trial,
            )
        )

    method: SplitMethod
    reports: list[SplitRoundReport]

    @property
    def parties(self) -> tuple[Party, ...]:
        """The edges, with the split plans of the latest round's end."""
        return self.method.parties

    @property
    def transport(self) -> str:
        """The transport of features and gradients."""
        return self.method.transport
