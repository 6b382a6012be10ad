"""Options of a deployment as plain values: the app, its nodes, and the SuperLink, local or remote."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from socflower.engines.app_files import AppFiles
from socflower.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployedApp:
    """The app, its scenario document, and the nodes that it needs."""

    # Read by ServerApp, ClientApps and cloud; written to each attempt's folder.
    document: Mapping[str, Any]
    # Reads the document from the attempt's folder.
    local_files: AppFiles
    # Carries the document in its bundle.
    bundle_files: AppFiles
    # `--node-config` of each SuperNode, without its ring's address.
    node_configs: tuple[str, ...]
    # Its clients connect to the cloud of a split training.
    needs_cloud: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentOptions:
    """Where to run and how often to restart, as given on the command line."""

    # HOST:PORT, or a name in the user's Flower configuration; "": start a local one.
    superlink: str = ""
    # The certificate authority of a SuperLink given by its address.
    superlink_ca: Path | None = None
    restarts: int = 3
    # On the machine of a remote SuperLink; "": none.
    checkpoint_folder: str = ""
    # Remove the checkpoints in it first.
    fresh: bool = False
    # Flower's id of a run that was submitted before: its log is read, and nothing is submitted.
    run_id: int | None = None
    # A client's process stays for the run, see `warm_executor.py`; False: Flower starts one for each message.
    resident: bool = True

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ConfigError(f"--restarts {self.restarts}: must be 0 or more")
        if self.superlink_ca is not None and not self.is_address:
            raise ConfigError(
                "--superlink-ca belongs to a --superlink HOST:PORT; a connection of the Flower "
                "configuration names its own root-certificates"
            )
        if self.superlink_ca is not None and not self.superlink_ca.is_file():
            raise ConfigError(f"--superlink-ca {self.superlink_ca}: no such file")
        if self.checkpoint_folder and not self.superlink:
            raise ConfigError(
                "--checkpoint-folder is a folder on the machine of --superlink; without one, checkpoints "
                "are in the folder of --out"
            )
        if self.is_address and self.superlink_ca is None and not _is_loopback(self.superlink):
            raise ConfigError(
                f"--superlink {self.superlink}: plain HTTP is for 127.0.0.1 only; name the SuperLink's "
                "certificate authority with --superlink-ca FILE"
            )

    @property
    def is_address(self) -> bool:
        """Whether `superlink` is an address, and not a name."""
        return ":" in self.superlink


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
