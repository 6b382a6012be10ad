"""A machine on which the testbed can be built."""

import pytest

from tests.testbed.testbed import missing


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip, with the reason, where there are none."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
