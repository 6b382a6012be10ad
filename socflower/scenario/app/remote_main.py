"""The scenario's app on a remote SuperLink: it reads the scenario from its bundle and reports through its log.

On the SuperLink's machine a temporary folder replaces the run's folder. Checkpoints are kept on that machine, in the
folder that the run config names, and are removed when the run succeeds.

A command submits its app more than once: a *series*. The submission that holds the lock of the checkpoints trains; the
others have loaded everything, and wait for the lock, which the kernel releases when its holder dies; one that hangs is
killed by those that wait, so that it writes nothing more. A file beside the checkpoints says whether the series has
ended, so that none begins again.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from socflower.engines.app_files import (
    CHECKPOINT_FOLDER_KEY,
    FRESH_KEY,
    SEND_MODEL_KEY,
    SERIES_KEY,
)
from socflower.engines.checkpoint import CheckpointFolder, Checkpointing
from socflower.engines.deployment.outcome_lines import (
    MAX_FILE_BYTES,
    READY,
    SCENARIO,
    file_documents,
    print_line,
    to_lines,
)
from socflower.engines.run_folder import OUTCOME, STATUS, CloudAddress, RunFolder
from socflower.errors import ConfigError
from socflower.quantities import human_bytes
from socflower.scenario.app.deployed import bundled_document, needs_cloud
from socflower.scenario.app.main import scenario_client_app, scenario_server_app
from socflower.scenario.app.round_record import versions
from socflower.scenario.schema.file import from_document, to_document
from socflower.scenario.schema.scenario_file import Scenario
from socflower.wire.folders import temporary_folder
from socflower.wire.saved_state import write_atomically

ENGINE = "deployment"
STATE_FOLDER_KEY = "state-folder"
"""Key of a SuperNode's config: the folder in which its machine keeps the states of trainings that may be resumed."""

_SERIES_FILE = "series.json"
# Within this time the ServerApp of an earlier attempt notices that the SuperLink dropped it.
_ENDING_S = 60.0
# Nodes of a rack were there before the run; those that are not by now may be away for long, and are taken in later.
_OTHERS_S = 15.0
# Flower uploads the log several times a second, and waits 3 s for the rest at a run's end.
_PART_S = 0.25
# An upper bound on the names and headers in the file.
_NPZ_BYTES = 2**20
# A larger trace is not sent, since it would fill the SuperLink's database.
_MAX_TRACE_BYTES = 64 * 2**20


def bundled_server_app(bundle: Path) -> ServerApp:
    """Return the ServerApp of the scenario in the folder `bundle`."""

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        kept = str(context.run_config.get(CHECKPOINT_FOLDER_KEY, ""))
        with temporary_folder() as path:
            folder = BundledRunFolder(
                path=path,
                bundle=bundle,
                kept=Path(kept) if kept else None,
                fresh=bool(context.run_config.get(FRESH_KEY, False)),
                print_line=print_line,
                run_id=context.run_id,
                sends_model=bool(context.run_config.get(SEND_MODEL_KEY, False)),
                series=str(context.run_config.get(SERIES_KEY, "")),
            )
            folder.write_description()
            with suppress(_SeriesEnded), _on_stop(folder.end_series):
                scenario_server_app(lambda _: folder, others_s=_OTHERS_S)(grid, context)

    return app


class _SeriesEnded(BaseException):
    """Another submission of the series has trained to the end; no error, so nothing reports it as one."""


@contextmanager
def _on_stop(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` when the run is stopped, as by `flwr stop`.

    Flower sends SIGINT to its own process then, and also when its SuperExec has died, as with the SuperLink.
    """
    parent, before = os.getppid(), signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getppid() == parent:
            act()
        assert callable(before)
        before(number, frame)

    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def bundled_client_app(bundle: Path) -> ClientApp:
    """Return the ClientApp of the scenario in the folder `bundle`."""
    folder = BundledRunFolder(
        path=bundle, bundle=bundle, kept=None, fresh=False, print_line=print_line
    )
    return scenario_client_app(lambda context: folder)


@dataclass(frozen=True, slots=True)
class BundledRunFolder(RunFolder):
    """A run's folder on the SuperLink's machine; the machine that submitted the run sees only its log."""

    bundle: Path
    # The folder of the run's checkpoints.
    kept: Path | None
    fresh: bool
    print_line: Callable[[str], None]
    # Flower's id of the run.
    run_id: int = 0
    sends_model: bool = False
    series: str = ""

    @property
    def training(self) -> str:
        """Flower's id of the run, which a resumed training keeps."""
        return str(self.run_id)

    def read_scenario(self) -> dict[str, Any]:
        """Return the document of the bundle's scenario."""
        return bundled_document(self.bundle)

    def write_description(self) -> None:
        """Log the scenario, with which `socflower fetch` makes a result of the log."""
        self._log(SCENARIO, self.read_scenario())

    def read_checkpointing(self) -> Checkpointing | None:
        """Return where checkpoints are kept and which to resume from; `ConfigError` if they are of another run."""
        if self.kept is None:
            return None
        kept, scenario = _checkpoints(self.kept), to_document(_scenario(self.bundle))
        self._log(READY, self.run_id)
        self._lock(kept)
        has_begun, has_ended = self._read_series()
        if has_ended:
            kept.close()
            raise _SeriesEnded
        if self.fresh and not has_begun:
            kept.clear()
        kept.create()
        self._write_series(has_ended=False)
        checkpoint = kept.resume(scenario, ENGINE, versions(), self.print_line)
        self._log("resumed", {"after_round": 0 if checkpoint is None else checkpoint.server_round})
        return Checkpointing(kept=kept, engine=ENGINE).after(checkpoint)

    def _lock(self, kept: CheckpointFolder) -> None:
        """Wait for the lock of the checkpoints while another submission of this series holds it, else for a minute."""
        while True:
            try:
                kept.open(
                    f"{CHECKPOINT_FOLDER_KEY} {self.kept}",
                    wait_s=_ENDING_S,
                    on_wait=self.print_line,
                )
                return
            except ConfigError:
                if self._read_series() != (True, False):
                    raise

    def end_series(self) -> None:
        """Let no other submission of the series train, if this one does."""
        if self.kept is not None and _checkpoints(self.kept).is_open:
            self._write_series(has_ended=True)

    def _write_series(self, *, has_ended: bool) -> None:
        if self.series and self.kept is not None:
            document = {"series": self.series, "has_ended": has_ended}
            write_atomically(self.kept / _SERIES_FILE, json.dumps(document))

    def _read_series(self) -> tuple[bool, bool]:
        """Return whether the newest training here is of this series, and whether the series has ended."""
        if self.series and self.kept is not None:
            with suppress(OSError, ValueError, LookupError, TypeError):
                document = json.loads((self.kept / _SERIES_FILE).read_text("utf-8"))
                is_ours = document["series"] == self.series
                return is_ours, is_ours and bool(document["has_ended"])
        return False, False

    def clients_folder(self, context: Context) -> Path | None:
        """Return where this node keeps trainer states; None if its config names no folder, or nothing can resume."""
        named = str(context.node_config.get(STATE_FOLDER_KEY, ""))
        return Path(named) if named and context.run_config.get(CHECKPOINT_FOLDER_KEY) else None

    def read_cloud(self) -> CloudAddress | None:
        """Return the cloud's address from the environment of this SuperLink; a split scenario needs one."""
        cloud, scenario = CloudAddress.from_environment(), _scenario(self.bundle)
        if cloud is None and needs_cloud(scenario):
            raise ConfigError(
                f"[strategy] name = {scenario.strategy.name!r} needs a cloud, and this SuperLink's "
                "environment names none; set SOCFLOWER_CLOUD and SOCFLOWER_CLOUD_TOKEN_FILE there"
            )
        return cloud

    def append_progress(self, entry: dict[str, Any]) -> None:
        """Log a line about the round that just ended."""
        self._log("progress", entry)

    def require_room_for_model(self, num_bytes: int) -> None:
        """Raise `ConfigError` for a model that is too large for a log."""
        if self.sends_model and num_bytes + _NPZ_BYTES > MAX_FILE_BYTES:
            raise ConfigError(
                f"--save-model: the model has {human_bytes(num_bytes)}, and with --superlink it comes "
                f"back in the run's log, which carries at most {human_bytes(MAX_FILE_BYTES)}; leave it "
                "out, or train it with a SuperLink that is started here"
            )

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Log a status, and an outcome with what belongs to it; other documents are for this machine."""
        if name == STATUS:
            self._log(name, {**document, "at_s": time.time()})
        elif name == OUTCOME:
            self._log_outcome(document)
        else:
            # `super()` would be the class before `slots=True` made another of it.
            RunFolder.write(self, name, document)

    def _log_outcome(self, outcome: Mapping[str, Any]) -> None:
        """Log trace and model, then the outcome; remove the checkpoints after a success."""
        if self.trace.exists():
            if self.trace.stat().st_size <= _MAX_TRACE_BYTES:
                self._log("trace", json.loads(self.trace.read_text("utf-8")))
            else:
                descriptor, kept = tempfile.mkstemp(prefix="socflower-trace-", suffix=".json")
                os.close(descriptor)
                shutil.copyfile(self.trace, kept)
                self.print_line(
                    f"the trace is long and stays on the SuperLink's machine, until you remove it: {kept}"
                )
        if self.sends_model and "error" not in outcome:
            for document in file_documents(self.model):
                self._log("model", document)
                time.sleep(_PART_S)
        self._log(OUTCOME, outcome)
        if "error" not in outcome or "kind" in outcome:
            # After other errors, such as those of a connection, another submission may do better.
            self.end_series()
        if self.kept is not None and "error" not in outcome:
            _checkpoints(self.kept).remove()

    def _log(self, kind: str, document: Any) -> None:
        for line in to_lines(kind, document):
            self.print_line(line)


@cache
def _checkpoints(folder: Path) -> CheckpointFolder:
    """Return the checkpoints in `folder`, open until the run succeeds or this process ends."""
    return CheckpointFolder(folder)


@cache
def _scenario(bundle: Path) -> Scenario:
    return from_document(bundled_document(bundle))
