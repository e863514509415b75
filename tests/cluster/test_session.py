"""Connecting: what is there stays, what is started here goes, and who may not is told in seconds."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
from cluster.conftest import TOKEN, leftovers

from penstock.cluster.launcher import FREE, CPUActorLauncher
from penstock.cluster.line import ActorGone
from penstock.cluster.session import connect
from penstock.environment import environment_replaced
from penstock.errors import ConfigError
from penstock.resources import CPUResourcesConfig

SMALL = CPUResourcesConfig(num_cpus_per_worker=0.5, cpu_memory_per_worker=100 << 20)


def processes_with(words: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words in command:
                found.append(command[:200])
    return found


def test_a_local_ray_is_stopped_again_and_touches_neither_home_nor_environment(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with environment_replaced(variables | {"HOME": str(home), "SECRET_KEY": "x"}):
        before = dict(os.environ)
        with connect("local", num_cpus=1, object_store_memory=80 << 20) as session:
            directory = session._directory
            assert dict(os.environ) == before
            assert processes_with(str(directory))
            (member,) = CPUActorLauncher(session).launch("one", SMALL, group=FREE)
            seen = ray.get(member.handle.__ray_call__.remote(lambda host: dict(os.environ)))
            # Neither what is secret, nor a number of threads that Ray chose.
            assert "SECRET_KEY" not in seen and seen["OMP_NUM_THREADS"] == "1"
        assert dict(os.environ) == before
    assert list(home.iterdir()) == []
    assert not directory.exists()
    assert processes_with(str(directory)) == []


def test_a_cluster_that_was_there_stays_and_nothing_is_left_in_it(cluster):
    with connect(cluster.address) as session:
        CPUActorLauncher(session).launch("a", SMALL)
        assert leftovers_here() == 3  # an actor, its name and its placement group
    assert leftovers(cluster) == []
    with connect(cluster.address) as again:
        assert len(again.nodes()) == 3


def leftovers_here() -> int:
    actors = [a for a in ray._private.state.actors().values() if a["State"] != "DEAD"]
    groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    return len(actors) + len(groups) + len(ray.util.list_named_actors(all_namespaces=True))


def test_nothing_is_left_after_a_failure_either(cluster):
    with pytest.raises(ZeroDivisionError), connect(cluster.address) as session:
        CPUActorLauncher(session).launch("a", SMALL)
        raise ZeroDivisionError
    assert leftovers(cluster) == []


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"RAY_AUTH_TOKEN": TOKEN[::-1]}, id="wrong"),
        pytest.param({"RAY_AUTH_MODE": "disabled"}, id="none"),
    ],
)
def test_a_wrong_token_is_a_clear_error_in_seconds(cluster, variables):
    began = time.monotonic()
    with environment_replaced(dict(os.environ) | variables), pytest.raises(ConfigError) as caught:
        connect(cluster.address)
    assert "does not take this token" in str(caught.value) and "RAY_AUTH_TOKEN" in str(caught.value)
    assert time.monotonic() - began < 15
    assert not ray.is_initialized()
    with connect(cluster.address) as session:
        assert len(session.nodes()) == 3


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "nothing answers at 127.0.0.1:1"),
        ("somewhere", "it must be auto, local or HOST:PORT"),
    ],
)
def test_an_address_where_no_ray_is_is_refused(address, said):
    with pytest.raises(ConfigError) as caught:
        connect(address)
    assert said in str(caught.value)


def test_auto_is_the_cluster_of_this_machine(cluster):
    with environment_replaced(dict(os.environ) | {"RAY_ADDRESS": cluster.address}), connect("auto") as session:
        assert len(session.nodes()) == 3


WITHOUT_TOKEN = """
from ray.cluster_utils import Cluster
from penstock.cluster.line import ActorGone
from penstock.cluster.session import connect
from penstock.errors import ConfigError

small = {"num_cpus": 1, "object_store_memory": 80 << 20}
nodes = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
try:
    connect(nodes.address).close()
    print("one node needs no token")
    nodes.add_node(**small)
    try:
        connect(nodes.address)
    except ConfigError as error:
        print(error)
    connect(nodes.address, trusted_network=True).close()
    print("unless its network is trusted")
finally:
    nodes.shutdown()
"""


def test_several_nodes_need_a_token_or_the_word_that_their_network_is_trusted(tmp_path):
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    directory = Path(tempfile.mkdtemp(prefix="psc-"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TOKEN],
        env=variables | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(directory), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    shutil.rmtree(directory, ignore_errors=True)
    first, refused, last = done.stdout.strip().splitlines()
    assert first == "one node needs no token" and last == "unless its network is trusted", done.stderr
    assert "the cluster has 2 nodes and no token" in refused and "--trusted-network" in refused


def test_a_local_ray_ends_with_a_driver_that_is_killed():
    """No process is left; the directory is."""
    program = (
        "import time\n"
        "from penstock.cluster.session import connect\n"
        "print(connect('local', num_cpus=1, object_store_memory=80 << 20)._directory, flush=True)\n"
        "time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    directory = driver.stdout.readline().strip()
    assert processes_with(directory)
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 60
    while processes_with(directory):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    driver.stdout.close()
    shutil.rmtree(directory)


def test_a_call_that_comes_too_late_starts_no_ray(cluster):
    with connect(cluster.address) as session:
        (member,) = CPUActorLauncher(session).launch("a", SMALL)
    with pytest.raises(ActorGone):
        asyncio.run(member.identify())
    assert not ray.is_initialized()
