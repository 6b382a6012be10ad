"""A cloud for one test."""

from collections.abc import Iterator

import pytest

from tests.edgecloud.cloud.local import Cloud


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with Cloud() as made:
        yield made
