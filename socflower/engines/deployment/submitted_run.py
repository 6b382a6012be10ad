"""A run through Flower's command line: submission to a SuperLink, its log, its status and its stop."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from socflower.engines.deployment.flower_processes import Process, end, start
from socflower.engines.deployment.private_network import MACHINE_NETWORK, Network

_RUN_ID = re.compile(r"Successfully started run (\d+)")
_COMMAND_TIMEOUT_S = 60.0


class FlwrClient:
    """`flwr` for one SuperLink: `connection` is its name in the Flower configuration of `environment`.

    `network` is the network in which it reaches the SuperLink.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        connection: str,
        folder: Path,
        network: Network = MACHINE_NETWORK,
    ) -> None:
        self._network = network
        self._environment = environment
        self._connection = connection
        self._folder = folder
        self._num_logs = 0

    def submit(self, app: Path) -> "RunLog":
        """Submit the app to the SuperLink and follow its log."""
        return self._follow(["flwr", "run", str(app), self._connection, "--stream"])

    def log_again(self, run_id: int) -> "RunLog":
        """Follow the log of a run from its beginning."""
        return self._follow(["flwr", "log", str(run_id), self._connection, "--stream"])

    def status(self, run_id: int) -> str | None:
        """Return Flower's status of a run, such as "running" or "finished:failed"; None if it does not answer."""
        answer = self._run(
            ["flwr", "list", "--run-id", str(run_id), self._connection, "--format", "json"]
        )
        # The command prints text before the JSON document.
        start_of_document = answer.find("{")
        if start_of_document < 0:
            return None
        try:
            runs = json.loads(answer[start_of_document:])["runs"]
            return str(runs[0]["status"])
        except (ValueError, LookupError, TypeError):
            return None

    def stop(self, run_id: int) -> None:
        """Ask the SuperLink to stop a run; a run that has ended is not changed."""
        self._run(["flwr", "stop", str(run_id), self._connection])

    def _follow(self, command: list[str]) -> "RunLog":
        self._num_logs += 1
        path = self._folder / f"run-{self._num_logs}.log"
        return RunLog(
            start(self._network.command(command), self._environment, path, self._folder), path
        )

    def _run(self, command: list[str]) -> str:
        try:
            ran = subprocess.run(
                self._network.command(command),
                env=dict(self._environment),
                cwd=self._folder,
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return ""
        return ran.stdout


class RunLog:
    """The log of a run while a `flwr` process writes it to a file."""

    def __init__(self, process: Process, path: Path) -> None:
        self.path = path
        self.run_id: int | None = None
        self._process = process
        self._stream = path.open("r", encoding="utf-8", errors="replace", newline="\n")
        self._partial = ""

    def ended(self) -> bool:
        """Return whether `flwr` has ended: the run has ended, or the SuperLink no longer answers."""
        return self._process.poll() is not None

    def new_lines(self) -> Iterator[str]:
        """Yield the lines written since the last call."""
        while chunk := self._stream.readline():
            self._partial += chunk
            if not self._partial.endswith("\n"):
                return
            line, self._partial = self._partial[:-1], ""
            if self.run_id is None and (found := _RUN_ID.search(line)):
                self.run_id = int(found[1])
            yield line

    def close(self) -> None:
        """End `flwr`; this does not end the run."""
        self._stream.close()
        if not self.ended():
            end(self._process)
