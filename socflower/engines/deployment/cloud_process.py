"""The cloud process of a deployment on this machine, which is restarted if it ends."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from socflower.engines.deployment.flower_processes import START_TIMEOUT_S, Process, free_ports, start, tail
from socflower.engines.deployment.private_network import MACHINE_NETWORK, Network
from socflower.engines.run_folder import CloudAddress
from socflower.errors import TrainingFailed
from socflower.wire.saved_state import write_atomically

_POLL_S = 0.1
_STARTS = 3


class LocalCloud:
    """`socflower cloud serve` with sessions in `folder`; a restart keeps the port."""

    def __init__(
        self, folder: Path, document: Mapping[str, Any], environment: Mapping[str, str],
        on_notice: Callable[[str], None], network: Network = MACHINE_NETWORK,
    ) -> None:
        self._network = network
        self._folder, self._environment, self._on_notice = folder / "cloud", environment, on_notice
        self._folder.mkdir(exist_ok=True)
        self._scenario = self._folder / "scenario.json"
        write_atomically(self._scenario, json.dumps(document))
        self._port = free_ports(1)[0]
        self._token_file = self._folder / "token"
        self._process = self._start()

    @property
    def address(self) -> CloudAddress:
        """What a ServerApp needs to open sessions here."""
        return CloudAddress(address=f"127.0.0.1:{self._port}", token_file=str(self._token_file))

    @property
    def pid(self) -> int:
        """Process id of the current cloud process."""
        return self._process.pid

    def restart_if_ended(self) -> None:
        """Restart the cloud if it has ended; edges reconnect by themselves."""
        code = self._process.poll()
        if code is not None:
            self._on_notice(f"the cloud ended (exit status {code}); starting it again")
            self._process = self._start()

    def _start(self) -> Process:
        for _ in range(_STARTS - 1):
            if (process := self._start_once()) is not None:
                return process
            self._on_notice("the cloud was killed while it started; starting it again")
        process = self._start_once()
        if process is None:
            raise TrainingFailed(f"engine deployment: the cloud was killed at each of its {_STARTS} starts; is there "
                                 "enough memory?")
        return process

    def _start_once(self) -> Process | None:
        """Start the cloud once; return its process when it listens, or None if it was killed before that."""
        log = self._folder / "log"
        command = ["socflower", "cloud", "serve", str(self._scenario), "--listen", self.address.address,
                   "--token-file", self.address.token_file, "--folder", str(self._folder / "sessions"),
                   "--threads", "1"]
        process = start(self._network.command(command), self._environment, log, self._folder, append=True)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._network.listens(self._port):
            code = process.poll()
            if code is not None and code < 0:
                return None
            if code is not None:
                raise TrainingFailed(f"engine deployment: the cloud ended at its start: {tail(log)}")
            if time.monotonic() > deadline_s:
                raise TrainingFailed(f"engine deployment: the cloud was not ready after {START_TIMEOUT_S:g} s: "
                                     f"{tail(log)}")
            time.sleep(_POLL_S)
        return process
