"""Connecting to a Ray cluster, or starting one on this machine.

    auto         the cluster that this machine belongs to
    HOST:PORT    that one
    local        a Ray on this machine, started for this run and stopped after it

A cluster that was there is never stopped. Everything of a run lives in one namespace of Ray, and when the session is
closed, also after a failure, it is gone: actors, placement groups, names.

Ray turns token authentication on by itself for local clusters, with a file in the user's home and a variable in this
process. Here the mode and the token's path are said explicitly, and neither is touched. A cluster of several nodes
needs the token (`RAY_AUTH_MODE=token` and `RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH` in the environment), or the word
that its network is trusted.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.services import canonicalize_bootstrap_address

from penstock.cluster.line import new_connection
from penstock.cluster.resources import NodeResources
from penstock.environment import child_environment, environment_replaced
from penstock.errors import ConfigError, RunError
from penstock.models.cores import available_cores

logger = logging.getLogger(__name__)

_raylet: Any = ray._raylet
# A call that comes after the connection was closed would start a Ray in passing.
ray._private.auto_init_hook.enable_auto_connect = False

LOCAL, AUTO = "local", "auto"
CONNECT_S = 5.0
GONE_S = 15.0
"""How long what was killed may take to be gone from Ray's tables."""
LOOK_S, LOOKS, LOST_S = 2.0, 3, 20.0
"""How often it is looked whether the cluster is there; it is lost when it was not so often in a row, for so long. That
is shorter than the minute after which Ray ends a process that lost its cluster."""
NOT_ASKED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""This machine could not look: that says nothing of the cluster."""
SHUT_DOWN_S, LOST_SHUT_DOWN_S = 30.0, 5.0
OBJECT_STORE = 4 << 30
"""Of a Ray that is started here, at most. Records are small and weights go another way; what is kept for train ranks is
large. It takes memory when it is used."""
OBJECT_STORE_SHARE = 1 / 6
"""Of this machine's memory, at most."""


class Session:
    """A connection of this process. `close` it, or use it as a context."""

    def __init__(self, *, namespace: str, directory: Path | None) -> None:
        self.namespace = namespace
        self.connection = new_connection()
        self._closing = threading.Event()
        self._directory = directory
        """Of a Ray that was started here."""
        self._actors: list[Any] = []
        self._groups: list[Any] = []
        self._owning = threading.Lock()
        self._closed = False
        address = str(ray.get_runtime_context().gcs_address)
        threading.Thread(target=self._look, args=(address,), name="look for the cluster", daemon=True).start()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look(self, address: str) -> None:
        """Ray waits for a cluster that is gone for a minute, and then ends the process without a word."""
        host, _, port = address.rpartition(":")
        there, failed = time.monotonic(), 0
        while not self._closing.wait(LOOK_S):
            try:
                socket.create_connection((host, int(port)), timeout=LOOK_S).close()
                there, failed = time.monotonic(), 0
            except OSError as error:
                if error.errno in NOT_ASKED:
                    there = time.monotonic()
                    continue
                failed += 1
                if failed >= LOOKS and time.monotonic() - there > LOST_S and not self._closing.is_set():
                    self.connection.lose(f"nothing has answered at {address} for {LOST_S:g} s: the Ray cluster is gone")
                    return

    def nodes(self) -> list[NodeResources]:
        """Those that are alive, with what they have and what is free now; in the order of their ids."""
        free = ray._private.state.available_resources_per_node()
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"]))
        addresses = [node["NodeManagerAddress"] for node in nodes]
        return [
            NodeResources(
                name=_node_name(node, several=addresses.count(node["NodeManagerAddress"]) > 1),
                resources=dict(free.get(node["NodeID"], {})),
                total=dict(node["Resources"]),
            )
            for node in nodes
        ]

    def own(self, *, actor: Any = None, group: Any = None) -> None:
        """It is ended with the session. Of any thread, like `disown`."""
        with self._owning:
            if actor is not None:
                self._actors.append(actor)
            if group is not None:
                self._groups.append(group)

    def disown(self, *, actor: Any = None, group: Any = None) -> None:
        """End it now."""
        with self._owning:
            self._actors = [other for other in self._actors if other is not actor]
            self._groups = [other for other in self._groups if other is not group]
        if self.connection.lost:
            return
        if actor is not None:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        if group is not None:
            remove = functools.partial(ray.util.remove_placement_group, group)
            with contextlib.suppress(Exception):
                self._in_time(remove, GONE_S, "a placement group was not removed")

    def close(self) -> None:
        """End what is this run's and disconnect; a Ray that was started here is stopped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._in_time(self._end_all, GONE_S + LOST_S, "what is this run's was not ended")
        finally:
            self._closing.set()
            self._shut_down()
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
            read_authentication_again()

    def _shut_down(self) -> None:
        ended = threading.Event()

        def shut_down() -> None:
            try:
                ray.shutdown()
            finally:
                ended.set()

        threading.Thread(target=shut_down, name="leave the cluster", daemon=True).start()
        if not ended.wait(LOST_SHUT_DOWN_S if self.connection.lost else SHUT_DOWN_S):
            logger.warning("the connection to Ray did not close")
            atexit.unregister(ray.shutdown)  # it would be waited for again

    def _in_time(self, work: Callable[[], None], seconds: float, otherwise: str) -> None:
        """In a thread of its own: what asks a cluster that is gone, or does not answer, may never return. It is left
        behind when that is known."""
        done, errors = threading.Event(), list[Exception]()

        def run() -> None:
            try:
                work()
            except Exception as error:
                errors.append(error)
            done.set()

        if self.connection.lost:
            return
        threading.Thread(target=run, name="ask the cluster", daemon=True).start()
        forget = self.connection.when_lost(lambda words: done.set())
        try:
            if not done.wait(seconds):
                logger.warning("%s within %g s", otherwise, seconds)
        finally:
            forget()
        if errors:
            raise errors[0]

    def _end_all(self) -> None:
        actors = {actor._actor_id.hex() for actor in self._actors}
        groups = {group.id.hex() for group in self._groups}
        for actor in list(self._actors):
            self.disown(actor=actor)
        for group in list(self._groups):
            self.disown(group=group)
        deadline = time.monotonic() + GONE_S
        while left := _still_there(actors, groups):
            if time.monotonic() > deadline:
                logger.warning("not gone from the cluster after %g s: %s", GONE_S, ", ".join(left))
                return
            time.sleep(0.05)


def connect(
    address: str,
    *,
    trusted_network: bool = False,
    name: str = "run",
    num_cpus: int | None = None,
    object_store_memory: int | None = None,
) -> Session:
    """Raises ConfigError when there is no such cluster, when it does not take our token, or when it has several nodes
    and neither a token nor `trusted_network`.

    `num_cpus` is what a local Ray is told that this machine has; None counts its cores. `object_store_memory` is its
    share of the memory for objects; None: see `OBJECT_STORE`.
    """
    if ray.is_initialized():
        raise ConfigError("this process is connected to a Ray already; call ray.shutdown() first")
    namespace = f"penstock-{name}-{uuid.uuid4().hex[:8]}"
    if address == LOCAL:
        return _start_local(namespace, num_cpus, object_store_memory)
    # Ray writes its choice of mode into the environment.
    with environment_replaced(dict(os.environ)):
        read_authentication_again()
        found = _find(address)
        try:
            # Once: Ray itself tries a wrong token for twenty seconds, and then says that there is no cluster.
            _raylet.GcsClient(address=found)
            ray.init(address=found, namespace=namespace, **_QUIET)
        except ray.exceptions.AuthenticationError as error:
            raise _wrong_token(found, error) from None
        except Exception as error:
            raise ConfigError(f"no connection to the Ray cluster {found}: {_first_line(error)}") from None
    session = Session(namespace=namespace, directory=None)
    try:
        _require_authentication(session, trusted_network)
    except BaseException:
        session.close()
        raise
    return session


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}


def _start_local(namespace: str, num_cpus: int | None, object_store_memory: int | None) -> Session:
    # Short: the sockets in it have a path of at most 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="psray-"))
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    variables = child_environment() | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        with environment_replaced(variables):
            read_authentication_again()
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=num_cpus or available_cores(),
                num_gpus=None,
                object_store_memory=object_store_memory or _object_store(),
                include_dashboard=False,
                _temp_dir=str(directory),
                **_QUIET,
            )
    except Exception as error:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
        raise RunError(f"a local Ray could not be started: {_first_line(error)}") from error
    return Session(namespace=namespace, directory=directory)


def _object_store() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(OBJECT_STORE, int(memory * OBJECT_STORE_SHARE))


def read_authentication_again() -> None:
    """Ray keeps mode and token of the first connection of a process."""
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


def _find(address: str) -> str:
    """The cluster's HOST:PORT, where something answers. Ray itself tries for a minute, and ends the process then."""
    if address == AUTO:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        try:
            address = str(canonicalize_bootstrap_address(AUTO))
        except ConnectionError:
            raise ConfigError(
                "--address is auto, and no Ray runs on this machine; start one with: ray start --head, or give "
                "--address local"
            ) from None
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"--address is {address!r}; it must be auto, local or HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"nothing answers at {address}: {error}; start one there with: ray start --head --port {port}"
        ) from None
    return address


def _require_authentication(session: Session, trusted_network: bool) -> None:
    nodes = session.nodes()
    with_token = _raylet.get_authentication_mode() == _raylet.AuthenticationMode.TOKEN
    if len(nodes) > 1 and not trusted_network and not with_token:
        raise ConfigError(
            f"the cluster has {len(nodes)} nodes and no token: whoever reaches it may run code on all of them. Start "
            "Ray with RAY_AUTH_MODE=token and give the same token here, or say --trusted-network"
        )


def _wrong_token(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the Ray cluster {address} does not take this token: {_first_line(error)} Give the token that it was started "
        "with: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    )


def _still_there(actors: set[str], groups: set[str]) -> list[str]:
    found = []
    for actor in actors:
        state = ray._private.state.actors(actor_id=actor).get("State", "DEAD")
        if state != "DEAD":
            found.append(f"actor {actor} ({state})")
    table = ray.util.placement_group_table()
    found += [f"placement group {g}" for g in groups if table.get(g, {}).get("state", "REMOVED") != "REMOVED"]
    return found


def _node_name(node: dict[str, Any], *, several: bool) -> str:
    address = str(node["NodeManagerAddress"])
    return f"{address} ({node['NodeID'][:8]})" if several else address


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
