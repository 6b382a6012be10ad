"""The reverse proxy of docs/examples/nginx in front of a SuperLink of a test, on an address and ports of the test."""

import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import suppress
from pathlib import Path

CONF = Path(__file__).parents[3] / "docs" / "examples" / "nginx" / "superlink.conf"
DOOR_ADDRESS = "127.0.0.2"
"""As others reach this machine: nothing that is bound to 127.0.0.1 alone answers there."""

CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "confirm-message-received",
    "get-run",
    "get-fab",
    "pull-object",
    "push-object",
)
FLEET = {f"/v1/fleet/{call}" for call in CALLS}
TRICKS = [
    "/",
    "/v1/control/list-nodes",
    "/v1/control/start-run",
    "/v1/runtime/acquire-task",
    "/health",
    "/docs",
    "/openapi.json",
    "/v1/fleet",
    "/v1/fleet/",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "/v1/fleet/../control/list-nodes",
    "/v1/fleet/pull-messages/../../control/list-nodes",
    "/v1/fleet/..%2fcontrol/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes",
    "/v1/fleet%2f..%2fcontrol%2flist-nodes",
    "/v1/control/../fleet/pull-messages",
    "/v1/control/list-nodes/../../fleet/pull-messages",
    "/v1/control/list-nodes%2f..%2f..%2ffleet%2fpull-messages",
    "/v1/control/list-nodes;/../../fleet/pull-messages",
    "//v1/control/list-nodes",
    "/v1//control/list-nodes",
    "/v1/fleet//pull-messages",
    "//v1/fleet/pull-messages",
    "/v1/./fleet/pull-messages",
    "/v1/fleet/%70ull-messages",
    "/V1/CONTROL/list-nodes",
    "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages?/v1/control/list-nodes",
    "/v1/fleet/pull-messages#/v1/control/list-nodes",
    "/v1/control/list-nodes#/../../fleet/pull-messages",
    "/v1/control/list-nodes?x=/v1/fleet/pull-messages",
    "/v1/fleet/pull-messages%00",
    "/v1/control/list-nodes%00/v1/fleet/pull-messages",
    "/v1/fleet\\..\\control\\list-nodes",
    "/v1/fleet/..;/control/list-nodes",
    "/v1/fleet/.%2e/control/list-nodes",
    "/v1/fleet/..%252fcontrol/list-nodes",
    "https://127.0.0.1:8000/v1/control/list-nodes",
    "http://127.0.0.1/v1/control/list-nodes",
    "https://127.0.0.1:8000/v1/fleet/../control/list-nodes",
    "127.0.0.1:8000",
    "*",
    "v1/control/list-nodes",
]
"""Targets of requests that must not be passed on."""

_AROUND = """\
{user}worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
daemon off;
events {{ worker_connections 256; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    log_format passed "$request_uri\t$status\t$upstream_addr";
    access_log {folder}/access.log passed;
    include {folder}/superlink.conf;
}}
"""


def missing() -> str | None:
    """Return why there can be no proxy here."""
    if _nginx() is None:
        return "nginx is not installed; apt-get install nginx"
    try:
        with socket.socket() as probe:
            probe.bind((DOOR_ADDRESS, 0))
    except OSError as error:
        return f"{DOOR_ADDRESS} is no address of this machine ({error.strerror})"
    return None


class Door:
    """nginx with the shipped configuration; used as a context, it ends."""

    def __init__(self, folder: Path, certificates: Path, port: int, superlink_port: int) -> None:
        """Pass calls at `port` on to `superlink_port` of 127.0.0.1; `certificates` has the files of /etc/socflower."""
        self.folder, self.port, self.ca = folder, port, certificates / "ca.pem"
        self.address = f"{DOOR_ADDRESS}:{port}"
        text, places = (
            CONF.read_text("utf-8"),
            {
                "listen 8443 ssl;": f"listen {self.address} ssl;",
                "listen [::]:8443 ssl;": "",
                "https://127.0.0.1:8000": f"https://127.0.0.1:{superlink_port}",
            },
        )
        for shipped, ours in places.items():
            assert text.count(shipped) == 1, shipped
            text = text.replace(shipped, ours)
        (folder / "superlink.conf").write_text(
            re.sub(r"/etc/socflower/", f"{certificates}/", text), "utf-8"
        )
        # Else root's nginx has a worker that may not write into folders of tests.
        user = "user root;\n" if os.geteuid() == 0 else ""
        (folder / "nginx.conf").write_text(_AROUND.format(folder=folder, user=user), "utf-8")
        nginx = _nginx()
        assert nginx is not None
        self._process = subprocess.Popen(
            [nginx, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"],
            stdin=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < end_s, (
                folder / "error.log"
            ).read_text()
            time.sleep(0.05)

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def ask(
        self, request: bytes, protocols: tuple[str, ...] = (), at: tuple[str, int] | None = None
    ) -> bytes:
        """What comes back for the bytes of a request, as somebody sends them who holds the rack's `ca.pem`.

        They go to the door, or to another address, `at`.
        """
        host, port = at or (DOOR_ADDRESS, self.port)
        context = ssl.create_default_context(cafile=str(self.ca))
        if protocols:
            context.set_alpn_protocols(list(protocols))
        answer = b""
        # It may refuse the protocol, or close while it is being spoken to.
        with (
            suppress(ConnectionError, ssl.SSLError),
            socket.create_connection((host, port), timeout=60) as raw,
            context.wrap_socket(raw, server_hostname=host) as stream,
        ):
            stream.sendall(request)
            while piece := stream.recv(65536):
                answer += piece
        return answer

    def passed(self) -> list[tuple[str, str]]:
        """Path as it was sent and status of each request that was passed on."""
        lines = [
            line.split("\t")
            for line in (self.folder / "access.log").read_text("utf-8").splitlines()
        ]
        return [(path, status) for path, status, upstream in lines if upstream != "-"]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((DOOR_ADDRESS, self.port), timeout=5):
                return True
        except OSError:
            return False


def _nginx() -> str | None:
    # Debian keeps it where only root's PATH leads.
    return shutil.which(
        "nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    )
