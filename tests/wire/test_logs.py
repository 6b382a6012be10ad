"""A log that nobody can fill or end: few lines for each peer and minute, and a count of the others."""

import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from socflower.wire.logs import RefusalLog
from tests.one_line import one_line


class Watched:
    """A refusal log on a clock of its own."""

    def __init__(self, **options: int) -> None:
        self.now_s, self.lines = 0.0, list[str]()
        self.log = RefusalLog(self.lines.append, what="port", clock=lambda: self.now_s, **options)

    def refuse(self, host: str, num: int = 1) -> None:
        for port in range(num):
            self.log.report(f"ipv4:{host}:{port}", f"refused {host}")


def test_after_a_flood_of_refusals_the_next_minute_is_logged_again_with_a_count() -> None:
    """The cloud's log was silent for the rest of its life after 200."""
    watched = Watched()
    watched.refuse("10.0.0.1", 1000)
    assert len(watched.lines) == 5
    assert watched.lines[-1].startswith("refused 10.0.0.1; ")
    watched.now_s = 61.0
    watched.refuse("10.0.0.2")
    counted, line = watched.lines[5:]
    one_line(counted, "port: 995 more", "ipv4:10.0.0.1", "60 s")
    assert line == "refused 10.0.0.2"
    watched.refuse("10.0.0.1")
    assert watched.lines[7:] == ["refused 10.0.0.1"]


def test_one_peer_does_not_use_up_anothers_lines() -> None:
    watched = Watched()
    watched.refuse("10.0.0.1", 1000)
    watched.refuse("10.0.0.2", 3)
    assert watched.lines.count("refused 10.0.0.2") == 3


def test_an_attacker_with_many_addresses_costs_neither_memory_nor_log() -> None:
    watched = Watched()
    for host in range(10_000):
        watched.refuse(f"10.1.{host // 256}.{host % 256}", 2)
    assert len(watched.lines) == 32 * 2 + 5
    assert len(watched.log._periods) == 33
    watched.now_s = 60.0
    watched.refuse("10.0.0.1")
    one_line(watched.lines[-2], f"port: {2 * (10_000 - 32) - 5} more", "60 s")
    assert watched.lines[-1] == "refused 10.0.0.1" and len(watched.log._periods) == 1


def test_what_was_only_counted_is_said_at_the_end() -> None:
    watched = Watched()
    watched.refuse("10.0.0.1", 8)
    watched.now_s = 12.0
    watched.log.flush()
    assert len(watched.lines) == 5
    watched.log.flush(everything=True)
    one_line(watched.lines[5], "port: 3 more", "ipv4:10.0.0.1", "12 s")
    watched.log.flush(everything=True)
    assert len(watched.lines) == 6


@given(
    events=st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 6)), max_size=300),
    lines=st.integers(1, 4),
    hosts=st.integers(1, 4),
)
def test_every_refusal_is_logged_or_counted(
    events: list[tuple[float, int]], lines: int, hosts: int
) -> None:
    watched = Watched(lines_per_period=lines, most_hosts=hosts)
    per_minute: Counter[int] = Counter()
    for wait_s, host in events:
        watched.now_s += wait_s
        before = len(watched.lines)
        watched.refuse(f"host{host}")
        per_minute[int(watched.now_s // 60)] += sum(
            "refused" in line for line in watched.lines[before:]
        )
        assert len(watched.log._periods) <= hosts + 1
    watched.log.flush(everything=True)
    counted = [re.match(r"port: (\d+) more refusals", line) for line in watched.lines]
    assert sum(int(match[1]) if match else 1 for match in counted) == len(events)
    # A fixed minute overlaps two periods of each host at most.
    assert all(num <= 2 * lines * (hosts + 1) for num in per_minute.values())
