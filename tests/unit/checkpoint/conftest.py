"""An S3 server for each file of tests, and a place of its own for each test."""

from collections.abc import Iterator

import pytest

from tests.support.stores import S3, serving


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving() as server:
        yield server


@pytest.fixture
def prefix(request) -> str:
    return f"runs/{abs(hash(request.node.nodeid))}"
