"""The event clock, with one set of constants, gives the eight exchange latencies of SoCFlow+ section 2.2."""

import pytest

from socflower.cluster import parse_cluster
from socflower.hierarchy import Exchange, GradientExchange, exchange_graph
from socflower.sim import EventClock

VGG11 = Exchange(num_bytes=4.0 * 9_225_610, num_tensors=18)
RESNET18 = Exchange(num_bytes=4.0 * 11_173_962, num_tensors=62)


@pytest.mark.parametrize(
    ("exchange", "kind", "num_socs", "published_ms"),
    [
        (VGG11, "ring", 5, 540),
        (VGG11, "ring", 32, 1248),
        (VGG11, "server", 5, 2060),
        (VGG11, "server", 32, 20593),
        (RESNET18, "ring", 5, 699),
        (RESNET18, "ring", 32, 2225),
        (RESNET18, "server", 5, 2700),
        (RESNET18, "server", 32, 26505),
    ],
)
def test_simulated_exchange_is_within_15_percent_of_the_paper(
    exchange: Exchange,
    kind: str,
    num_socs: int,
    published_ms: float,
) -> None:
    clock = EventClock(parse_cluster({"boards": 7}))
    usage = clock.run(exchange_graph(range(num_socs), exchange, GradientExchange(kind=kind)))
    assert 1e3 * usage.duration_s == pytest.approx(published_ms, rel=0.15)
