"""A real Ray: three nodes on this machine, shared by all tests here, and connections to it.

The nodes have a temporary directory of their own, small object stores and a token. What a test leaves in the cluster is
found when its connection closes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from penstock.cluster.session import Session, connect, read_authentication_again
from penstock.environment import child_environment, environment_replaced
from penstock.models import set_cache_directory

NODE = {"num_cpus": 4, "object_store_memory": 80 << 20, "memory": 4 << 30}
TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="session", autouse=True)
def _use_model_cache(model_cache: Path) -> Iterator[None]:
    set_cache_directory(model_cache)
    yield
    set_cache_directory(None)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes. A test that takes one away adds it first."""
    # Short, because of the sockets in it.
    directory = Path(tempfile.mkdtemp(prefix="psc-"))
    variables = child_environment() | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "",
    }
    with environment_replaced(variables):
        read_authentication_again()
        nodes = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
        try:
            for _ in range(2):
                nodes.add_node(**NODE)
            nodes.wait_for_nodes()
            yield nodes
        finally:
            nodes.shutdown()
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def session(cluster: Cluster) -> Iterator[Session]:
    """A connection; afterwards nothing of it may be left."""
    with connect(cluster.address, name="test") as session:
        yield session
    assert leftovers(cluster) == []


def leftovers(cluster: Cluster) -> list[str]:
    """What lives in the cluster, asked of Ray's own tables by a connection that made nothing."""
    with connect(cluster.address, name="look"):
        actors = [
            f"actor {actor['Name']} {actor['State']}"
            for actor in ray._private.state.actors().values()
            if actor["State"] != "DEAD"
        ]
        groups = [
            f"placement group {name} {group['state']}"
            for name, group in ray.util.placement_group_table().items()
            if group["state"] != "REMOVED"
        ]
        names = [f"name {named}" for named in ray.util.list_named_actors(all_namespaces=True)]
    return actors + groups + names
