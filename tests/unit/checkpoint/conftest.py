"""One S3 server for these tests, and a place of its own for each."""

from collections.abc import Iterator

import pytest

from tests.support.stores import S3, serving


@pytest.fixture(scope="package")
def s3() -> Iterator[S3]:
    with serving() as server:
        yield server


@pytest.fixture
def prefix(request) -> str:
    return f"runs/{abs(hash(request.node.nodeid))}"
