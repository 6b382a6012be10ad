"""Tokens and certificates are replaced while something runs: it goes on, and the old ones are refused afterwards."""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.edgecloud.cloud.operator_calls import (
    CloudOperator,
    close_session,
    open_session,
    session_status,
)
from socflower.edgecloud.runtime.edge_connection import EdgeConnection
from socflower.edgecloud.stream import credentials
from socflower.edgecloud.stream.credentials import TokenFile, new_token
from socflower.edgecloud.stream.frames import SplitRefused
from socflower.peers.resumable_stream import StreamLost
from socflower.peers.transports.port import RingPort
from socflower.wire.secure_channel import PeerUnreachable, Tls
from tests.edgecloud.cloud.local import Cloud, train
from tests.edgecloud.runtime.numpy_halves import FINGERPRINT, Front, connect
from tests.one_line import refused
from tests.peers.certificates import Authority
from tests.peers.peers import TOKEN, free_addresses

PATIENCE_S = 60.0


class Pki:
    """The PEM files of a machine, which are replaced by those of another authority."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.old, self.new = (
            Authority(folder, name).member(f"{name}-member") for name in ("old", "new")
        )
        self.files = Tls(*(folder / f"here.{end}" for end in ("ca", "crt", "key")))
        self.install(self.old)

    def install(self, tls: Tls, *names: str) -> None:
        """Copy files over those of the machine, by default all."""
        for name in names or ("ca", "certificate", "key"):
            target = getattr(self.files, name)
            partial = target.with_suffix(".part")
            shutil.copyfile(getattr(tls, name), partial)
            partial.replace(target)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def addresses() -> list[str]:
    return free_addresses(2)


@pytest.fixture
def here(pki: Pki, addresses: list[str]) -> Iterator[RingPort]:
    port = member(pki.files, addresses)
    port.handle("echo", lambda caller, body: body)
    yield port
    port.close()


def member(tls: Tls, addresses: list[str], rank: int = 0) -> RingPort:
    return RingPort(
        addresses[rank] if rank == 0 else "127.0.0.1:0",
        rank=rank,
        addresses=addresses,
        token=TOKEN,
        tls=tls,
        heartbeat_s=5.0,
        log=lambda line: None,
    )


def answers(tls: Tls, addresses: list[str]) -> bool:
    """Whether a member with these files is answered on a new connection."""
    peer = member(tls, addresses, 1)
    try:
        return peer.call(0, "echo", b"x", timeout_s=PATIENCE_S) == b"x"
    except PeerUnreachable:
        return False
    finally:
        peer.close()


def test_a_ring_takes_new_certificates_and_refuses_the_old_ones(
    pki: Pki, addresses: list[str], here: RingPort
) -> None:
    peer = member(pki.files, addresses, 1)
    try:
        assert peer.call(0, "echo", b"before", timeout_s=PATIENCE_S) == b"before"
        assert answers(pki.old, addresses) and not answers(pki.new, addresses)
        # A key whose certificate has not been copied yet changes nothing.
        pki.install(pki.new, "key")
        assert answers(pki.old, addresses)
        pki.install(pki.new)
        assert answers(pki.new, addresses) and not answers(pki.old, addresses)
        # What was connected stays so, and connects anew with the new files.
        assert peer.call(0, "echo", b"after", timeout_s=PATIENCE_S) == b"after"
        assert peer._new_channel(0).unary_unary(peer._path("echo"))(b"new") == b"new"
    finally:
        peer.close()


def test_while_both_authorities_are_trusted_both_get_in(
    pki: Pki, addresses: list[str], here: RingPort, tmp_path: Path
) -> None:
    """How an authority is replaced node by node: first all trust both, then each gets its new certificate."""
    both = tmp_path / "both.pem"
    assert pki.old.ca and pki.new.ca
    both.write_bytes(pki.old.ca.read_bytes() + pki.new.ca.read_bytes())
    pki.install(replace(pki.old, ca=both))
    assert answers(replace(pki.old, ca=both), addresses)
    assert answers(replace(pki.new, ca=both), addresses)
    pki.install(replace(pki.new, ca=both))
    assert answers(replace(pki.old, ca=both), addresses)
    assert answers(pki.new, addresses)


def test_a_cloud_takes_new_tokens_and_certificates_while_an_edge_trains(
    pki: Pki, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    before, after = new_token(), new_token()
    file.write_text(before)
    tokens = TokenFile(file, grace_s=0.0)
    with Cloud(operator_token=tokens, tls=pki.files) as cloud:
        address = cloud.service.address

        def operator(tls: Tls, token: str | TokenFile) -> CloudOperator:
            return CloudOperator(address=address, token=token, tls=tls, timeout_s=PATIENCE_S)

        # The manager reads its own copy of the file.
        cloud.operator = operator(pki.files, TokenFile(file))
        run_token = open_session(cloud.operator, run_id="run", fingerprint=FINGERPRINT)
        front = Front()
        edge = connect(cloud.port, token=run_token, tls=pki.files)
        train(edge, front, 8)

        file.write_text(after)
        pki.install(pki.new)
        assert session_status(operator(pki.new, after))
        for tls, token, error in (
            (pki.new, before, SplitRefused),
            (pki.old, after, (SplitRefused, StreamLost)),
        ):
            with pytest.raises(error):
                session_status(operator(tls, token))
        # The run that is open goes on: over the connection it has, and over a new one.
        train(edge, front, 8, first=8)
        edge.close()
        train(connect(cloud.port, token=run_token, tls=pki.files), front, 8, first=16)
        assert cloud.trained(front, 24)
        open_session(cloud.operator, run_id="run", fingerprint=FINGERPRINT, replace=True)
        again = connect(cloud.port, token=run_token, tls=pki.files, give_up_s=2.0)
        refused(lambda: train(again, Front(), 1), "token", error=SplitRefused)


def test_a_cloud_that_is_restarted_after_a_rotation_has_the_edges_of_its_open_runs(
    tmp_path: Path,
) -> None:
    """And not those of a run that was closed, or opened again since."""
    file, folder = tmp_path / "token", tmp_path / "cloud"
    file.write_text(new_token())
    options = {"operator_token": TokenFile(file, grace_s=0.0), "folder": folder}
    with Cloud(**options) as cloud:
        cloud.operator = dataclasses.replace(cloud.operator, token=TokenFile(file))
        tokens = [
            open_session(cloud.operator, run_id=run, fingerprint=FINGERPRINT)
            for run in ("kept", "again", "closed")
        ]
        file.write_text(new_token())
        open_session(cloud.operator, run_id="again", fingerprint=FINGERPRINT, replace=True)
        close_session(cloud.operator, "closed")
    for path in (path for path in folder.rglob("*") if path.is_file()):
        has_token = any(token.encode() in path.read_bytes() for token in tokens)
        assert not has_token or path.stat().st_mode & 0o077 == 0, path
    with Cloud(operator_token=TokenFile(file), folder=folder) as cloud:

        def edge(number: int) -> EdgeConnection:
            run = ("kept", "again", "closed")[number]
            return connect(cloud.port, run_id=run, token=tokens[number], give_up_s=2.0)

        train(edge(0), Front(), 4)
        for number in (1, 2):
            refused(lambda number=number: train(edge(number), Front(), 1), error=SplitRefused)


def test_the_token_before_is_accepted_for_a_while(tmp_path: Path) -> None:
    """On another machine the file changes at another time."""
    file, now_s = tmp_path / "token", [1_000_000.0]
    file.write_text("a" * 20)
    tokens = TokenFile(file, grace_s=60.0, clock=lambda: now_s[0])
    file.write_text("b" * 20)
    os.utime(file, (now_s[0], now_s[0]))
    assert tokens.accepted() == ("b" * 20, "a" * 20) and tokens() == "b" * 20
    now_s[0] += 59.0
    assert len(tokens.accepted()) == 2
    now_s[0] += 2.0
    assert tokens.accepted() == ("b" * 20,)


@given(
    st.lists(
        st.one_of(
            st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=24), st.none()
        ),
        max_size=8,
    )
)
def test_a_token_file_gives_the_newest_token_that_was_whole(contents: list[str | None]) -> None:
    """Whatever is written, or removed: an editor may write it in two steps."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(credentials, "warn", lambda line: None)
        path, newest = Path(folder) / "token", "first-" + "x" * 16
        path.write_text(newest)
        tokens = TokenFile(path, grace_s=0.0)
        for number, content in enumerate(contents, 1):
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_text(content)
                # The clock of a file system may be too coarse for two changes.
                os.utime(path, ns=(number, number))
            newest = content if content and len(content) >= 16 else newest
            assert tokens() == newest and tokens.accepted() == (newest,)
