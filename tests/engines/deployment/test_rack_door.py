"""What passes the reverse proxy of docs/examples/nginx: the calls of registered SuperNodes, however one asks."""

import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from socflower.wire.certificates import write_certificates
from tests.engines.deployment.nginx_door import CONF, DOOR_ADDRESS, FLEET, TRICKS, Door, missing

if (_why := missing()) is not None:
    pytest.skip(_why, allow_module_level=True)


class Upstream:
    """In the SuperLink's place, a server that notes what reaches it."""

    def __init__(self, certificates: Path) -> None:
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def note(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                seen.append(
                    (
                        self.command,
                        self.path,
                        {key.lower(): value for key, value in self.headers.items()},
                    )
                )
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = do_CONNECT = note

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "superlink.pem", certificates / "superlink.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of /etc/socflower, the SuperLink's certificate made as docs/guides/deployment.md makes it."""
    folder = tmp_path_factory.mktemp("pki")
    write_certificates(folder, ["10.0.0.10"])
    sign_superlink(folder)
    return folder


def sign_superlink(folder: Path) -> None:
    subprocess.run(
        [
            "bash",
            "-euc",
            (
                "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -keyout "
                "superlink.key -out superlink.csr "
                '-subj "/CN=superlink"\n'
                "openssl x509 -req -in superlink.csr -CA ca.pem -CAkey ca.key -CAcreateserial "
                "-days 825 -out superlink.pem "
                f'-extfile <(printf "subjectAltName=IP:{DOOR_ADDRESS},IP:127.0.0.1,DNS:localhost")'
            ),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def upstream(certificates: Path) -> Iterator[Upstream]:
    upstream = Upstream(certificates)
    yield upstream
    upstream.close()


@pytest.fixture(scope="module")
def door(
    upstream: Upstream, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    from socflower.engines.deployment.flower_processes import free_ports

    with Door(
        tmp_path_factory.mktemp("nginx"), certificates, free_ports(1)[0], upstream.port
    ) as door:
        yield door


def request(
    target: str, method: str = "POST", headers: str = "", host: str = DOOR_ADDRESS
) -> bytes:
    return (
        f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\nConnection: close\r\n{headers}\r\n{{}}"
    ).encode("utf-8", "surrogateescape")


def test_every_call_of_a_super_node_passes_and_only_by_post(door: Door, upstream: Upstream) -> None:
    for path in sorted(FLEET):
        upstream.seen.clear()
        spoofed = "X-Forwarded-For: 10.0.0.1\r\nflwr-public-key: a2V5\r\nUpgrade: h2c\r\n"
        assert door.ask(request(path, headers=spoofed)).startswith(b"HTTP/1.1 200 ")
        ((method, seen, headers),) = upstream.seen
        assert (method, seen) == ("POST", path)
        assert (headers["flwr-public-key"], headers["x-forwarded-for"]) == ("a2V5", "127.0.0.1")
        assert "upgrade" not in headers
        for other in ("GET", "PUT", "DELETE", "OPTIONS", "CONNECT"):
            assert re.match(rb"HTTP/1\.1 (403|405) ", door.ask(request(path, other))), other
        assert len(upstream.seen) == 1


@pytest.mark.parametrize("target", TRICKS)
def test_nothing_else_is_passed_on(target: str, door: Door, upstream: Upstream) -> None:
    upstream.seen.clear()
    answer = door.ask(request(target))
    assert re.match(rb"HTTP/1\.1 4\d\d |$|<html>", answer), answer
    assert upstream.seen == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "superlink", "", "x/v1/fleet/"])
def test_a_wrong_host_opens_nothing(host: str, door: Door, upstream: Upstream) -> None:
    upstream.seen.clear()
    assert re.match(rb"HTTP/1\.1 4\d\d ", door.ask(request("/v1/control/list-nodes", host=host)))
    assert upstream.seen == []


def test_other_protocols_open_nothing(door: Door, upstream: Upstream) -> None:
    """HTTP/2 by name and by surprise, an upgrade, a web socket, a request hidden in the body of another."""
    upstream.seen.clear()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)
    assert door.ask(preface, ("h2",)) == b""  # no such protocol here
    assert b"HTTP/1.1 400" in door.ask(preface)
    for headers in (
        "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9\r\n",
    ):
        assert b" 404 " in door.ask(request("/v1/control/list-nodes", headers=headers))
    assert upstream.seen == []
    hidden = request("/v1/control/list-nodes")
    for smuggling in (
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: xchunked\r\nContent-Length: 3\r\n\r\nabc",
        "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        f"Content-Length: 0\r\nContent-Length: {len(hidden)}\r\n\r\n",
        "Content-Length: 0\r\n\r\n",
    ):
        door.ask(b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\n" + smuggling.encode() + hidden)
    assert {path for _, path, _ in upstream.seen} <= {"/v1/fleet/get-run"}


PIECES = [
    "/",
    "//",
    "v1",
    "fleet",
    "control",
    "runtime",
    "..",
    ".",
    "%2e",
    "%2f",
    "%5c",
    "\\",
    ";",
    "?",
    "#",
    "%00",
    "%",
    "pull-messages",
    "list-nodes",
    "register-node",
    ":",
    "@",
    "https://127.0.0.1:8000",
    "é",
    "\t",
    "\x00",
]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join))
def test_whatever_is_asked_only_the_calls_of_super_nodes_reach_the_super_link(
    door: Door,
    upstream: Upstream,
    target: str,
) -> None:
    upstream.seen.clear()
    door.ask(request(target))
    door.ask(request(f"/v1/fleet/{target}"))
    assert {path for _, path, _ in upstream.seen} <= FLEET


def test_a_super_link_that_another_process_pretends_to_be_gets_nothing(
    certificates: Path, tmp_path: Path
) -> None:
    from socflower.engines.deployment.flower_processes import free_ports

    other = tmp_path / "other"
    write_certificates(other, ["10.0.0.10"])
    sign_superlink(other)
    pretender = Upstream(other)
    folder = tmp_path / "nginx"
    folder.mkdir()
    try:
        with Door(folder, certificates, free_ports(1)[0], pretender.port) as door:
            assert door.ask(request("/v1/fleet/get-run")).startswith(b"HTTP/1.1 502 ")
        assert pretender.seen == []
    finally:
        pretender.close()


def test_the_configuration_is_what_the_page_says() -> None:
    page = (CONF.parents[2] / "guides" / "deployment.md").read_text("utf-8")
    unit = (CONF.parents[1] / "systemd" / "socflower-superlink.service").read_text("utf-8")
    assert "examples/nginx/superlink.conf" in page and "superlink.rack:8443" in page
    assert re.search(r"flower-superlink --host 127\.0\.0\.1 --port 8000", unit)
    assert "0.0.0.0" not in unit and "0.0.0.0 --port 8000" not in page
