"""The folder through which a running app and the process that started it exchange scenario, progress and outcome.

On the `simulation` and `deployment` engines Flower starts the ServerApp's process; all engines use the same files.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from socflower.engines.checkpoint import Checkpointing
from socflower.wire.saved_state import write_atomically
from socflower.wire.secure_channel import Tls

SCENARIO = "scenario"
"""The resolved scenario, for server and clients."""

CHECKPOINTING = "checkpointing"
"""Where the run keeps checkpoints and which one it resumes from, as of `Checkpointing.to_document`."""

SERVER = "server"
"""The process id `pid` of the ServerApp, so that its death is distinguishable from its silence."""

CLOUD = "cloud"
"""The `CloudAddress` of a split run."""

ENDING = "ending"
"""The `Ending` of a run that ends before its last round."""

STATUS = "status"
"""What the ServerApp is doing now."""

OUTCOME = "outcome"
"""The app's outcome, or `{"error": …}` with the `kind` of a `SocflowerError`."""


@dataclass(frozen=True, slots=True)
class CloudAddress:
    """The address of a split run's cloud, and the credentials that a ServerApp presents to it."""

    # As host:port.
    address: str
    # The file of the operator's token.
    token_file: str
    # The PEM file of the authority that signed its certificate.
    ca: str = ""
    # The PEM file of the ServerApp's certificate and key, for a cloud that requires one.
    certificate: str = ""
    key: str = ""

    @classmethod
    def from_environment(cls) -> "CloudAddress | None":
        """Return the address in a SuperLink's environment, by `SOCFLOWER_CLOUD` and names that begin with it."""
        address, *files = (
            os.environ.get(f"SOCFLOWER_CLOUD{end}", "")
            for end in ("", "_TOKEN_FILE", "_CA", "_CERTIFICATE", "_KEY")
        )
        return cls(address, *files) if address else None

    @property
    def tls(self) -> Tls | None:
        """The PEM files, or None for plain text; `ConfigError` for a certificate without its key."""
        files = [Path(name) if name else None for name in (self.ca, self.certificate, self.key)]
        return Tls(*files) if any(files) else None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and formats of one run's folder."""

    path: Path

    @property
    def trace(self) -> Path:
        """Where the app writes its Chrome trace."""
        return self.path / "trace.json"

    def read_scenario(self) -> dict[str, Any]:
        """Return the document of the scenario in this folder."""
        document = self.read(SCENARIO)
        assert document is not None
        return document

    def read_checkpointing(self) -> Checkpointing | None:
        """Return how the run keeps checkpoints, or None if it keeps none."""
        document = self.read(CHECKPOINTING)
        return None if document is None else Checkpointing.from_document(document)

    @property
    def training(self) -> str:
        """The id that names a new training's states at nodes; empty if these keep them in this folder."""
        return ""

    def clients_folder(self, context: Context) -> Path | None:
        """Return the folder in which this run's clients keep trainer states; None if they keep none."""
        return _clients_folder(self)

    def read_cloud(self) -> CloudAddress | None:
        """Return the cloud's address; None if both halves train in the clients' processes."""
        document = self.read(CLOUD)
        return None if document is None else CloudAddress(**document)

    def append_progress(self, entry: dict[str, Any]) -> None:
        """Add a line about the round that just ended."""
        with (self.path / "progress.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")

    def read_progress(self, first: int) -> Iterator[dict[str, Any]]:
        """Yield the complete progress lines from index `first` on."""
        path = self.path / "progress.jsonl"
        if path.exists():
            for line in path.read_text("utf-8").splitlines(keepends=True)[first:]:
                if line.endswith("\n"):
                    yield json.loads(line)

    @property
    def model(self) -> Path:
        """The file of the trained model."""
        return self.path / "model.npz"

    def require_room_for_model(self, num_bytes: int) -> None:
        """Raise `ConfigError` before a training whose model could not be handed over at its end."""

    def write_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the trained model: its arrays by the names of the state dict."""
        np.savez(self.model, **arrays)  # type: ignore[arg-type]

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write one of the run's documents, such as `OUTCOME`, all of it or nothing."""
        write_atomically(self.path / f"{name}.json", json.dumps(document))

    def read(self, name: str) -> dict[str, Any] | None:
        """Return one of the run's documents, or None while there is none."""
        path = self.path / f"{name}.json"
        document: dict[str, Any] | None = (
            json.loads(path.read_text("utf-8")) if path.exists() else None
        )
        return document


@cache
def _clients_folder(folder: RunFolder) -> Path | None:
    # Read once: Flower's processes may outlive the run's folder by some rounds.
    checkpointing = folder.read_checkpointing()
    return None if checkpointing is None else checkpointing.kept.clients
