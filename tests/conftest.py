"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster_fixture import Cluster, Container


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the stories' new answers instead of comparing")


#: Names whose agents have a key on the buses below.
NODES = ("n0", "n1", "s0")


@pytest.fixture(scope="session")
def three_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), NODES) as found:
        yield found


@pytest.fixture
def cluster(three_servers: Cluster) -> Cluster:
    """Three servers that run; a test may kill what it likes, the next one finds them started again."""
    three_servers.start_all()
    return three_servers


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    if why_not := Container.why_not():
        pytest.skip(why_not)
    with Container(tmp_path_factory.mktemp("container"), NODES) as found:
        yield found
