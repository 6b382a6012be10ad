"""Starts the members of a contest, on this machine's loopback or each in a namespace behind a rate-limited link.

`python -m benchmarks.ring_contest.launch FILE RATE` is the first process inside the namespaces; RATE is in bit/s.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.ring_contest.plan import Contest, Times
from socflower.wire.certificates import write_certificates
from tests.testbed.topology import Rack

REPOSITORY = Path(__file__).resolve().parents[2]
_NAMESPACES = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_TIMEOUT_S = 900.0
_FIRST_PORT = 28200


def on_loopback(contest: Contest, num_members: int) -> list[Times]:
    """Return what rank 0 measured; members are processes beside each other. `RuntimeError` if one fails."""
    return _result(
        contest, ["127.0.0.1"] * num_members, _free_ports(1 + num_members * len(contest.entries))
    )


def on_link(contest: Contest, num_members: int, bit_per_s: int) -> list[Times]:
    """Return what rank 0 measured; members are on one board, each behind a link of that rate in each direction."""
    rack = _rack(num_members, bit_per_s)
    return _result(
        contest, [rack.address(member) for member in range(num_members)], _FIRST_PORT, bit_per_s
    )


def _rack(num_members: int, bit_per_s: int) -> Rack:
    return Rack(slots_per_board=(num_members,), soc_bit_per_s=bit_per_s, uplink_bit_per_s=bit_per_s)


def _result(contest: Contest, hosts: list[str], port: int, bit_per_s: int = 0) -> list[Times]:
    with tempfile.TemporaryDirectory(prefix="ring-contest-") as folder:
        certificates = (
            write_certificates(Path(folder), hosts)
            if any(entry.tls for entry in contest.entries)
            else {}
        )
        tls = (
            [
                [str(getattr(certificates[host], part)) for part in ("ca", "certificate", "key")]
                for host in hosts
            ]
            if certificates
            else []
        )
        plan, said = Path(folder, "contest.json"), Path(folder, "stderr")
        plan.write_text(
            json.dumps({"contest": asdict(contest), "addresses": hosts, "port": port, "tls": tls}),
            "utf-8",
        )
        command = [
            sys.executable,
            "-m",
            "benchmarks.ring_contest.launch",
            str(plan),
            str(bit_per_s),
        ]
        if bit_per_s:
            command = [*_NAMESPACES, *command]
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env={**os.environ, **_ENVIRONMENT},
            )
            try:
                printed, _ = process.communicate(timeout=_TIMEOUT_S)
            finally:
                if process.poll() is None:
                    os.killpg(
                        process.pid, signal.SIGKILL
                    )  # its session has the members, and nothing else
                    process.wait()
        if process.returncode:
            raise RuntimeError(
                f"ring: a member failed\n{said.read_text('utf-8', 'replace')[-4000:]}"
            )
    return [
        Times(
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in times.items()
            }
        )
        for times in json.loads(printed)
    ]


def _free_ports(count: int) -> int:
    """Return the first of `count` ports in a row that are free now."""
    while True:
        first = random.SystemRandom().randrange(20_000, 30_000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return first


def main(path: str, bit_per_s: int) -> int:
    """Start the members, and end all of them when one fails."""
    document = json.loads(Path(path).read_text("utf-8"))
    num_members = len(document["addresses"])
    member = [sys.executable, "-m", "benchmarks.ring_contest.member", path]
    prefixes: Sequence[Sequence[str]] = [()] * num_members
    if bit_per_s:
        commands = _rack(num_members, bit_per_s).commands()
        script = "\n".join(["set -e", "mount -t tmpfs none /run", "mkdir -p /run/netns", *commands])
        subprocess.run(
            ["bash", "-c", script], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        prefixes = [("ip", "netns", "exec", f"soc{soc}") for soc in range(num_members)]
    processes = [
        subprocess.Popen([*prefix, *member, str(rank)]) for rank, prefix in enumerate(prefixes)
    ]
    left = {process.pid: process for process in processes}
    while left:
        pid, status = os.wait()
        if left.pop(pid, None) is not None and status:
            for process in left.values():
                process.kill()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
