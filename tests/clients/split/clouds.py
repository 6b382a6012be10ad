"""A cloud that listens in this process, and the edges and strategy that train with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from socflower.clients.split.app import make_split_client_app
from socflower.clients.split.cloud_sessions import CloudClient, session_factory
from socflower.clients.split.in_process import SplitSettings
from socflower.clients.split.remote_cloud import CloudLink
from socflower.cluster import parse_cluster
from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator
from socflower.edgecloud.split_program import SplitProgram
from socflower.edgecloud.stream.credentials import new_token
from socflower.strategies.split_replay import SplitReplay
from tests.clients.split.models import (
    BATCHES_PER_EPOCH,
    SEED,
    ThreadGrid,
    codes_of,
    parties_of,
    samples_of,
)

PATIENCE = CloudLink(give_up_s=20.0)


class Cloud:
    """A service of one program, and its operator."""

    def __init__(
        self,
        program: SplitProgram,
        *,
        knows_samples: bool = True,
        folder: Path | None = None,
        settings: SplitSettings | None = None,
    ) -> None:
        self.program, self.lines = program, list[str]()
        factory = session_factory(
            program,
            settings=settings,
            data_fn=None
            if not knows_samples
            else lambda party, num_parties: codes_of(program, party, num_parties),
        )
        token = new_token()

        def serve(port: int) -> CloudService:
            return CloudService(
                f"127.0.0.1:{port}",
                factory,
                operator_token=token,
                folder=folder,
                log=self.lines.append,
                gather_s=20.0,
                patience_s=20.0,
            )

        self._serve = serve
        self.service = serve(0)
        self.operator = CloudOperator(address=self.service.address, token=token, timeout_s=20.0)

    def restart(self) -> None:
        self.service.close()
        self.service = self._serve(self.service.port)

    def __enter__(self) -> "Cloud":
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()

    def client(self, **settings: Any) -> CloudClient:
        return CloudClient(self.operator, self.program, **settings)


def edge_app(
    program: SplitProgram, *, link: CloudLink = PATIENCE, settings: SplitSettings | None = None
) -> ClientApp:
    return make_split_client_app(
        lambda context: program,
        lambda context, party, num_parties: samples_of(program, party),
        cloud_data_fn=lambda context, party, num_parties: codes_of(program, party, num_parties),
        settings_fn=lambda context: settings or SplitSettings(),
        link_fn=lambda context: link,
    )


def strategy_of(
    program: SplitProgram,
    num_parties: int,
    cloud: Any,
    *,
    mode: Any = "own",
    num_epochs: int = 2,
    cut: int | None = 0,
    **party_settings: Any,
) -> SplitReplay:
    return SplitReplay(
        cluster=parse_cluster({"boards": [4]}),
        parties=parties_of(program, num_parties, cut=cut, **party_settings),
        edge_names=program.edge_names,
        batches_per_epoch=BATCHES_PER_EPOCH,
        num_epochs=num_epochs,
        mode=mode,
        reverse=program.is_reverse,
        seed=SEED,
        fingerprint=program.fingerprint(),
        cloud=cloud,
    )


def start(
    strategy: SplitReplay,
    program: SplitProgram,
    grid: ThreadGrid,
    arrays: Mapping[str, NDArray[Any]] | None = None,
) -> dict[str, NDArray[Any]]:
    initial = (
        {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        if arrays
        else program.model().state_dict()
    )
    result = strategy.start(
        grid,
        ArrayRecord(initial),  # type: ignore[arg-type]
        num_rounds=strategy.num_rounds,
        timeout=60,
    )
    return {name: array.numpy() for name, array in result.arrays.items()}
