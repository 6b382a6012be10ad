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

from benchmarks.harness import from_json
from benchmarks.processes import ONE_THREAD, REPOSITORY
from benchmarks.ring_contest.plan import Contest, Times
from socflower.wire.certificates import write_certificates
from tests.testbed.topology import NAMESPACES, Rack

_TIMEOUT_S = 900.0
_FIRST_PORT = 28200


def on_loopback(contest: Contest, num_members: int) -> list[Times]:
    """Return the measurements of rank 0; members are processes on one host. Raises `RuntimeError` if one fails."""
    return _result(
        contest, ["127.0.0.1"] * num_members, _free_ports(1 + num_members * len(contest.entries))
    )


def on_link(contest: Contest, num_members: int, bit_per_s: int) -> list[Times]:
    """Return the measurements of rank 0; members are on one board, behind links of this rate in each direction."""
    rack = _rack(num_members, bit_per_s)
    return _result(
        contest, [rack.address(member) for member in range(num_members)], _FIRST_PORT, bit_per_s
    )


def _rack(num_members: int, bit_per_s: int) -> Rack:
    return Rack(slots_per_board=(num_members,), soc_bit_per_s=bit_per_s, uplink_bit_per_s=bit_per_s)


def _result(contest: Contest, hosts: list[str], port: int, bit_per_s: int = 0) -> list[Times]:
    with tempfile.TemporaryDirectory(prefix="ring-contest-") as folder:
        tls: list[list[str]] = []
        if any(entry.tls for entry in contest.entries):
            made = write_certificates(Path(folder), hosts)
            tls = [
                [str(made[host].ca), str(made[host].certificate), str(made[host].key)]
                for host in hosts
            ]
        plan, said = Path(folder, "contest.json"), Path(folder, "stderr")
        asked = {"contest": asdict(contest), "addresses": hosts, "port": port, "tls": tls}
        plan.write_text(json.dumps(asked), "utf-8")
        command = [
            sys.executable,
            "-m",
            "benchmarks.ring_contest.launch",
            str(plan),
            str(bit_per_s),
        ]
        if bit_per_s:
            command = [*NAMESPACES, *command]
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env={**os.environ, **ONE_THREAD},
            )
            try:
                printed, _ = process.communicate(timeout=_TIMEOUT_S)
            finally:
                if process.poll() is None:
                    # Its session has only the members.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode:
            raise RuntimeError(
                f"ring: a member failed\n{said.read_text('utf-8', 'replace')[-4000:]}"
            )
    return [from_json(Times, times) for times in json.loads(printed)]


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
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
    """Start the members; if one fails, kill the others."""
    document = json.loads(Path(path).read_text("utf-8"))
    num_members = len(document["addresses"])
    member = [sys.executable, "-m", "benchmarks.ring_contest.member", path]
    prefixes: Sequence[Sequence[str]] = [()] * num_members
    if bit_per_s:
        _rack(num_members, bit_per_s).build()
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
