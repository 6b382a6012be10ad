"""The port for operators answers what Prometheus and a person ask, and nobody else keeps it from doing so."""

import json
import re
from http.client import HTTPConnection

import pytest

from socflower.wire.status_port import Metric, PortState, StatusPort, label, metric
from tests.one_line import refused

STATE = PortState(
    document={"kind": "run", "state": "training"},
    metrics=[
        metric("round", "Rounds that have ended.", 3),
        metric("restarts_total", "Times.", 1.5),
        metric("loss", "Loss.", None),
        Metric(name="nodes", help="Nodes.", values={label("state", 'a"\\\n'): 2, "{x}": None}),
    ],
)
# The grammar of a sample in Prometheus' text format 0.0.4.
SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="(\\.|[^"\\\n])*"\})? [0-9.e+-]+')


def asked(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection(address, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_metrics_are_in_prometheus_text_format() -> None:
    with StatusPort("127.0.0.1:0", lambda: STATE) as port:
        status, text = asked(port.address, "/metrics")
    assert status == 200
    assert text.splitlines() == [
        "# HELP socflower_round Rounds that have ended.",
        "# TYPE socflower_round gauge",
        "socflower_round 3.0",
        "# HELP socflower_restarts_total Times.",
        "# TYPE socflower_restarts_total counter",
        "socflower_restarts_total 1.5",
        "# HELP socflower_nodes Nodes.",
        "# TYPE socflower_nodes gauge",
        'socflower_nodes{state="a\\"\\\\\\n"} 2.0',
    ]
    assert all(SAMPLE.fullmatch(line) for line in text.splitlines() if line[0] != "#")


@pytest.mark.parametrize(
    ("state", "health", "readiness"),
    [
        (STATE, (200, "ok\n"), (200, "ok\n")),
        (PortState(document={}, not_ready="waiting"), (200, "ok\n"), (503, "waiting\n")),
        (PortState(document={}, fault="dead"), (503, "dead\n"), (503, "dead\n")),
    ],
)
def test_health_and_readiness_say_why_not(
    state: PortState, health: tuple[int, str], readiness: tuple[int, str]
) -> None:
    with StatusPort("127.0.0.1:0", lambda: state) as port:
        assert asked(port.address, "/healthz") == health
        assert asked(port.address, "/readyz?verbose") == readiness
        assert json.loads(asked(port.address, "/status")[1]) == state.document


def test_anything_else_is_refused() -> None:
    with StatusPort("127.0.0.1:0", lambda: STATE) as port:
        assert asked(port.address, "/")[0] == 404
        assert asked(port.address, "/metrics", "POST")[0] == 501
        assert asked(port.address, "/../etc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("9464", 'metrics "9464" is not host:port'),
        ("8.8.8.8:9464", "is not private"),
        ("0.0.0.0:9464", "means every interface"),
        ("10.255.255.254:1", "cannot be listened on"),
    ],
)
def test_addresses_that_do_not_fit_are_refused_in_a_line(address: str, named: str) -> None:
    def listen() -> None:
        with StatusPort(address, lambda: STATE):
            pass

    refused(listen, named)


def test_a_port_in_use_is_refused() -> None:
    with StatusPort("127.0.0.1:0", lambda: STATE) as port:
        again = StatusPort(port.address, lambda: STATE)
        refused(again.__enter__, "is in use", "choose another port")
