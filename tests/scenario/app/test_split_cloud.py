"""`socflower cloud`: a process that hosts the cloud's halves, its token, its end, and what it refuses."""

import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from rich.console import Console

from socflower.clients.split.cloud_sessions import CloudClient, session_factory
from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.operator_calls import CloudOperator, session_status
from socflower.edgecloud.split_program import SplitProgram
from socflower.edgecloud.stream.credentials import new_token
from socflower.engines.deployment.flower_processes import free_ports
from socflower.engines.run_folder import CLOUD, CloudAddress, RunFolder
from socflower.errors import SocflowerError
from socflower.peers.resumable_stream import StreamLost
from socflower.scenario.app.split_cloud import read_or_create_token, status_table
from socflower.scenario.app.strategy import cloud_of
from socflower.user_code import forgotten_modules
from socflower.wire.certificates import write_certificates
from socflower.wire.secure_channel import Tls
from socflower.wire.split_message_keys import SplitTask
from tests.clients.split.models import layered, task_settings
from tests.command_line import Ran, Socflower, is_mistake
from tests.engines.deployment.deployments import COMMAND
from tests.one_line import refused

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
WAIT_S = 90.0
SCENARIO = """\
# Is it served?
[cluster]
boards = [1]
[model]
name = "lenet5"
[strategy]
name = "split-replay"
[edgecloud]
link = "wifi"
"""
PROGRAM = """\
from tests.clients.split.models import layered

def program():
    return layered()

made = layered()
other = 3
"""


class Serving:
    """`socflower cloud serve` as a process."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.errors = folder / "errors"
        self.token_file = folder / "token"
        with self.errors.open("wb") as stream:
            self.process = subprocess.Popen(
                [
                    *[COMMAND, "cloud", "serve", *map(str, arguments)],
                    *["--token-file", str(self.token_file), "--threads", "1"],
                ],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
            )

    def first_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text("utf-8")
        return line

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def processes() -> Iterator[list[Serving]]:
    made: list[Serving] = []
    yield made
    for one in made:
        one.close()


def served_here(
    socflower: Socflower,
    arguments: Sequence[object],
    address: str,
    ask: Callable[[], T],
    number: signal.Signals,
) -> tuple[Ran, T]:
    """Return what the command said that served in this process until signal `number`, and what `ask` was answered."""
    answers: list[T] = []
    ended = threading.Event()

    def call() -> None:
        host, _, port = address.partition(":")
        end_s = time.monotonic() + WAIT_S
        while not ended.is_set() and time.monotonic() < end_s:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
                break
            time.sleep(0.01)
        try:
            # A former server of this process may still reset connections to the port.
            while not answers and not ended.is_set() and time.monotonic() < end_s:
                with suppress(StreamLost):
                    answers.append(ask())
        finally:
            if not ended.is_set():
                # To this thread, as the kernel may choose any: the command waits in another one.
                signal.pthread_kill(threading.get_ident(), number)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        ran = socflower("cloud serve", *arguments)
    finally:
        ended.set()
        thread.join()
    assert answers, ran
    return ran, answers[0]


def test_a_program_of_a_user_is_served_until_a_signal_and_again_with_its_sessions(
    folder: Path,
    socflower: Socflower,
) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    token_file = folder / "token"
    arguments = (
        *f"mine_too:program --listen {address} --folder sessions --json".split(),
        "--token-file",
        token_file,
    )
    program = layered()

    def operator() -> CloudOperator:
        return CloudOperator(
            address=address, token=token_file.read_text("utf-8").strip(), timeout_s=30.0
        )

    def open_session() -> SplitTask:
        return CloudClient(operator(), program, name="mine").open(
            SplitTask(**task_settings(fingerprint=program.fingerprint())), {}
        )

    ran, task = served_here(socflower, arguments, address, open_session, signal.SIGTERM)
    assert ran.status == 0 and json.loads(ran.out) == {"address": address}
    assert (task.run, task.address) == ("mine-0", address)
    assert token_file.stat().st_mode & 0o777 == 0o600 and f"made {token_file}" in ran.err
    again, sessions = served_here(
        socflower, arguments, address, lambda: session_status(operator()), signal.SIGINT
    )
    assert again.status == 0 and "made" not in again.err
    assert [(one["run_id"], one["batch"]) for one in sessions] == [("mine-0", 0)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_scenario_is_served_by_tls_and_an_edge_without_the_authority_is_told(
    processes: list[Serving],
    tmp_path: Path,
    socflower: Socflower,
) -> None:
    (tmp_path / "case.toml").write_text(SCENARIO)
    own = write_certificates(tmp_path / "own", ["127.0.0.1"])["127.0.0.1"]
    other = write_certificates(tmp_path / "other", ["127.0.0.1"])["127.0.0.1"]
    processes.append(
        serving := Serving(
            tmp_path,
            *["case.toml", "--listen", "127.0.0.1:0", "--set", "train.batch_size=64"],
            "--certificate",
            own.certificate,
            "--key",
            own.key,
        )
    )
    line = serving.first_line()
    assert line.startswith("listening on 127.0.0.1:") and line.endswith("; Ctrl-C ends\n")
    address = line.split()[2].rstrip(";")
    token = ("--token-file", serving.token_file)
    ran = socflower("cloud status", address, *token, "--ca", own.ca, "--json")
    assert (ran.status, json.loads(ran.out)["sessions"]) == (0, [])
    stranger = socflower("cloud status", address, *token, "--ca", other.ca)
    is_mistake(stranger, address)
    plain = socflower("cloud status", address, *token)
    is_mistake(plain, address)
    (tmp_path / "wrong").write_text(new_token())
    wrong = socflower("cloud status", address, "--token-file", "wrong", "--ca", own.ca)
    is_mistake(wrong, "call with a wrong token")
    assert serving.end(signal.SIGTERM) == 0


def test_a_cloud_that_requires_certificates_is_reached_with_one_and_without_refused_in_a_line(
    tmp_path: Path,
    socflower: Socflower,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = write_certificates(tmp_path / "own", ["127.0.0.1"])["127.0.0.1"]
    token_file, token = tmp_path / "token", new_token()
    token_file.write_text(token)
    program = layered()
    service = CloudService(
        "127.0.0.1:0",
        session_factory(program),
        operator_token=token,
        tls=Tls(own.ca, own.certificate, own.key),
    )
    with closing(service):
        status = ("cloud status", service.address, "--token-file", token_file, "--ca", own.ca)
        shown = ("--certificate", own.certificate, "--key", own.key)
        ran = socflower(*status, *shown, "--json")
        assert (ran.status, json.loads(ran.out)["sessions"]) == (0, [])
        for arguments, named in (((), "--ca"), (shown[:2], "key")):
            is_mistake(socflower(*status, *arguments), named)

        task = SplitTask(**task_settings(fingerprint=program.fingerprint()))
        for name, value in (("", service.address), ("_TOKEN_FILE", token_file), ("_CA", own.ca)):
            monkeypatch.setenv(f"SOCFLOWER_CLOUD{name}", str(value))
        client = server_app_client(tmp_path, program)
        refused(lambda: client.open(task, {}), service.address, error=SocflowerError)
        monkeypatch.setenv("SOCFLOWER_CLOUD_CERTIFICATE", str(own.certificate))
        monkeypatch.setenv("SOCFLOWER_CLOUD_KEY", str(own.key))
        opened = server_app_client(tmp_path, program).open(task, {})
        assert opened.address == service.address
        (session,) = json.loads(socflower(*status, *shown, "--json").out)["sessions"]
        assert (session["run_id"], session["batch"]) == (opened.run, 0)
        assert opened.run in socflower(*status, *shown).out


def server_app_client(folder: Path, program: SplitProgram) -> CloudClient:
    """The ServerApp's client of the cloud that the environment names, by way of the run's folder."""
    address, run = CloudAddress.from_environment(), RunFolder(folder)
    assert address is not None
    run.write(CLOUD, asdict(address))
    client = cloud_of(run, cast(Any, SimpleNamespace(workload=SimpleNamespace(program=program))))
    assert client is not None
    client._patience_s = 0.0
    return client


# -------------------------------------------------------------------------------------------------------- refusals
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command is run, with a scenario, a program and a token."""
    (tmp_path / "case.toml").write_text(SCENARIO)
    (tmp_path / "cluster.toml").write_text("[cluster]\nboards = [1, 1]\n")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "mine_too.py").write_text(PROGRAM)
    (tmp_path / "cloud-token").write_text(new_token())
    (tmp_path / "short-token").write_text("abc")
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten_modules(tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("missing.toml", "missing.toml"),
        ("missing.json", "missing.json: cannot be read"),
        ("broken.json", "broken.json: cannot be read"),
        ("cluster.toml", "no cloud"),
        ("case.toml --set edgecloud.cutt=1", "cutt"),
        ("nowhere:program", "nowhere:program"),
        ("mine_too:nothing", "mine_too:nothing"),
        (":program", "program :program"),
        ("mine_too:other", "is a int, not a SplitProgram"),
        ("mine_too:made --set seed=3", "--set"),
        ("mine_too:made --threads -1", "--threads -1"),
        ("mine_too:made --listen nowhere", '"nowhere"'),
        ("mine_too:made --listen 0.0.0.0:0", "TLS"),
        ("mine_too:made --token-file short-token", "at least 16"),
        ("mine_too:made --token-file no/folder/token", "--token-file no/folder/token"),
        ("mine_too:made --certificate cloud.pem", "key"),
        ("mine_too:made --ca ca.pem", "a certificate and a key"),
        ("mine_too:made --certificate case.toml --key case.toml", "PEM"),
        ("mine_too:made --listen 127.0.0.1:0 --folder case.toml", "folder case.toml"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    folder: Path, socflower: Socflower, arguments: str, named: str
) -> None:
    is_mistake(socflower(f"cloud serve {arguments}"), named)


@pytest.mark.slow  # a port is waited for, since a process that was killed may have left it in use for a moment
def test_a_port_that_is_in_use_is_one_line(folder: Path, socflower: Socflower) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = socflower("cloud serve mine_too:made --listen", address)
    is_mistake(ran, f"cloud address {address} is in use")


def test_handlers_of_signals_are_as_before_after_serving_ends(
    folder: Path, socflower: Socflower
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    socflower("cloud serve mine_too:made --listen nowhere")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_status_of_no_cloud_is_one_line(folder: Path, socflower: Socflower) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    began_s = time.monotonic()
    ran = socflower("cloud status", address)
    is_mistake(ran, f"the cloud at {address} cannot be reached")
    assert time.monotonic() - began_s < 60.0
    ran = socflower("cloud status", address, "--token-file", "missing")
    is_mistake(ran, "token file missing: cannot be read")


def test_a_token_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token, is_new = read_or_create_token(path)
    assert is_new and len(token()) >= 32 and path.stat().st_mode & 0o777 == 0o600
    again, is_new = read_or_create_token(path)
    assert (again(), is_new) == (token(), False)
    path.write_text("short")
    refused(lambda: read_or_create_token(path), "at least 16 printable")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 7}, "before batch 7"),
        ({"batch": 7, "waiting": [1]}, "1 of 2 edges are here"),
        ({}, "training"),
        ({"last_batch": 9}, "training, batch 9 done"),
        ({"error": "it broke"}, "it broke"),
    ],
)
def test_the_status_of_a_session_fits_into_a_narrow_terminal(
    changes: dict[str, object], says: str
) -> None:
    session = {
        "run_id": "run-0123abcd-1",
        "num_parties": 2,
        "batch": None,
        "waiting": [],
        "last_batch": None,
        "received_bytes": 2_000_000,
        "sent_bytes": 3,
        "error": "",
        **changes,
    }
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(status_table([session]))
    text = console.export_text()
    assert says in text and "run-0123abcd-1" in text and "2.00 MB" in text


def test_a_cloud_without_sessions_says_so() -> None:
    assert status_table([]) == "no sessions are open"
