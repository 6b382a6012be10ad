"""The sessions that a cloud hosts, in memory and in a folder, from which they are restored after a restart."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Lock

from socflower.edgecloud.cloud.session import CloudSession, SessionFactory, SessionTerms
from socflower.edgecloud.stream import split_pb2 as wire
from socflower.edgecloud.stream.frames import Limits, SplitRefused, StartOver, check_version
from socflower.errors import ConfigError, SocflowerError
from socflower.wire.arrays import MalformedBytes, unpack_arrays
from socflower.wire.folders import LOCK_FILE, FolderLock
from socflower.wire.saved_state import StateKind, read_sealed, seal, write_atomically

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_SESSION_FILE = "session.sealed"
# The tokens of the run's edges: the operator's, of which they were made, may be replaced before a restart.
_TOKENS_FILE = "edge-tokens.json"
_SESSION = StateKind(
    name="session of a split training",
    schema=3,
    remedy="open the run again",
)


class SessionStore:
    """Stores sessions by run; each has its own folder below `folder`, if one is given.

    A session is written there before it is served, with the tokens of its edges and without the operator's, so that a
    restarted service has the sessions of the one before. Raises `ConfigError` for a folder that cannot be used.
    """

    def __init__(
        self,
        factory: SessionFactory,
        *,
        folder: Path | None,
        limits: Limits,
        patience_s: float,
        gather_s: float,
        most_parties: int,
        log: Callable[[str], None],
    ) -> None:
        self._factory = factory
        self._folder = folder
        self._limits = limits
        self._patience_s = patience_s
        self._gather_s = gather_s
        self._most_parties = most_parties
        self._log = log
        self._lock = Lock()
        # One at a time: two openings of the same run must not write the same folder.
        self._opening = Lock()
        self._sessions: dict[str, CloudSession] = {}
        self._tokens_of: dict[str, tuple[str, ...]] = {}
        self._folder_lock: FolderLock | None = None
        try:
            self._restore()
        except BaseException:
            self._unlock()
            raise

    def all(self) -> list[CloudSession]:
        """Return all open sessions."""
        with self._lock:
            return list(self._sessions.values())

    def find(self, run_id: str) -> CloudSession | None:
        """Return a run's session, if it is open."""
        with self._lock:
            return self._sessions.get(run_id)

    def get(self, run_id: str) -> CloudSession:
        """Return a run's session; `SplitRefused` if it is not open."""
        session = self.find(run_id)
        if session is None:
            raise SplitRefused(f"run {run_id[:80]} is not open here; open it first")
        return session

    def tokens_of(self, run_id: str) -> tuple[str, ...]:
        """Return the tokens of an open run's edges."""
        with self._lock:
            return self._tokens_of.get(run_id, ())

    def open(self, opening: wire.Opening, packed: memoryview, tokens: tuple[str, ...]) -> None:
        """Open a run with packed weights, for edges that have one of `tokens`.

        Raises `SplitRefused` for a run that is open already, unless it is replaced, and whatever the factory raises.
        """
        terms = self.check(opening)
        run = f"run {terms.run_id}"
        with self._opening:
            if self.find(terms.run_id) is not None:
                if not opening.replace:
                    raise SplitRefused(f"{run} is open already; close it, or open it with replace")
                self.end(terms.run_id, forget=True)
            folder = self._run_folder(terms.run_id)
            try:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(mode=0o700)
                session = self._session(terms, packed)
                if folder is not None:
                    sealed = seal(_SESSION, {**asdict(terms), "settings": terms.settings}, [packed])
                    write_atomically(folder / _TOKENS_FILE, json.dumps(tokens), mode=0o600)
                    write_atomically(folder / _SESSION_FILE, sealed)
            except OSError as error:
                raise SplitRefused(
                    f"{run}: its folder cannot be written ({error.strerror}); make room"
                ) from None
            except MalformedBytes as refused:
                raise SplitRefused(f"{run} was opened with {refused}") from None
            with self._lock:
                self._sessions[terms.run_id] = session
                self._tokens_of[terms.run_id] = tokens

    def end(self, run_id: str, *, forget: bool) -> None:
        """End a run: its edges are refused from now on; `forget` removes its checkpoints too."""
        session = self.get(run_id)
        with self._lock:
            self._sessions.pop(run_id, None)
            self._tokens_of.pop(run_id, None)
        session.close(SplitRefused(f"run {run_id} was closed by its manager"))
        folder = self._run_folder(run_id)
        if folder is not None and forget:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder is not None:
            for name in (_SESSION_FILE, _TOKENS_FILE):
                (folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close all sessions; their files stay, and their edges try to reconnect."""
        for session in self.all():
            session.close(StartOver())
        self._unlock()

    def _unlock(self) -> None:
        if self._folder_lock is not None:
            self._folder_lock.release()

    def check(self, opening: wire.Opening) -> SessionTerms:
        """Return the terms of an opening; `SplitRefused` for invalid ones."""
        check_version(opening.version, "manager")
        run = f"run {opening.run_id[:80]!r}"
        if not _RUN_ID.fullmatch(opening.run_id):
            raise SplitRefused(f"{run}: a name has up to 64 letters, digits, '.', '_' and '-'")
        num_bytes = opening.num_bytes
        most_bytes = self._limits.max_weights_bytes
        if num_bytes > most_bytes:
            raise SplitRefused(f"{run}: {num_bytes} bytes of weights exceed {most_bytes}")
        most_parties = 1 if opening.reverse else self._most_parties
        if not 1 <= opening.num_parties <= most_parties:
            raise SplitRefused(
                f"{run}: num_parties = {opening.num_parties} must be from 1 to {most_parties}"
            )
        try:
            settings = json.loads(opening.settings or "{}")
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise SplitRefused(f"{run}: its settings are no JSON object")
        return SessionTerms(
            run_id=opening.run_id,
            fingerprint=opening.fingerprint,
            num_parties=opening.num_parties,
            joined=opening.joined,
            reverse=opening.reverse,
            settings=settings,
        )

    def _restore(self) -> None:
        if self._folder is None:
            return
        where = f"split cloud: folder {self._folder}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            paths = sorted(self._folder.glob(f"*/{_SESSION_FILE}"))
        except OSError as error:
            raise ConfigError(f"{where} cannot be used ({error.strerror})") from None
        self._folder_lock = FolderLock(self._folder / LOCK_FILE, where)
        for path in paths:
            try:
                document, packed = read_sealed(path, _SESSION)
                terms = SessionTerms(**document)
                tokens = tuple(
                    map(str, json.loads((path.parent / _TOKENS_FILE).read_text("utf-8")))
                )
                self._sessions[terms.run_id] = self._session(terms, packed)
                self._tokens_of[terms.run_id] = tokens
            except (OSError, SocflowerError, KeyError, TypeError, ValueError) as error:
                self._log(
                    f"split cloud: the run in {path.parent} is left out, its files cannot be used ({error})"
                )

    def _session(self, terms: SessionTerms, packed: memoryview) -> CloudSession:
        half = self._factory(terms, unpack_arrays(packed) if packed.nbytes else {})
        return CloudSession(
            terms,
            half,
            folder=self._run_folder(terms.run_id),
            limits=self._limits,
            patience_s=self._patience_s,
            gather_s=self._gather_s,
            log=self._log,
        )

    def _run_folder(self, run_id: str) -> Path | None:
        return self._folder / run_id if self._folder is not None else None
