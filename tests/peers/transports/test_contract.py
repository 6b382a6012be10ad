"""What every ring and star over real connections keeps to, whatever carries it."""

import pytest

from tests.peers import transport_contract as ring_contract

all_transports = pytest.mark.parametrize(
    "transport", ["gloo", "grpc", "gloo-server", "grpc-server"]
)


@pytest.mark.few_cells(2)
@all_transports
@pytest.mark.parametrize("size", [2, 4])
def test_operations(transport: str, size: int) -> None:
    ring_contract.check_operations(transport, size)


@all_transports
def test_every_type_sums(transport: str) -> None:
    ring_contract.check_types(transport)


@all_transports
def test_leaving_in_peace_takes_nothing_from_others(transport: str) -> None:
    ring_contract.check_graceful_close(transport)


@all_transports
def test_survivors_form_again(transport: str) -> None:
    ring_contract.check_survivors_form_again(transport)


@all_transports
def test_a_killed_member_is_lost(transport: str) -> None:
    ring_contract.check_death(transport)


@all_transports
def test_a_stopped_member_ends_the_wait_only_through_the_poll(transport: str) -> None:
    ring_contract.check_hang(transport)
