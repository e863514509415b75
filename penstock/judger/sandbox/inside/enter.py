"""Becomes a keeper in namespaces of its own: processes, files, network, users. What bubblewrap does, and no more.

    outer    stays outside of the process namespace, waits, and dies with whoever started it
    keeper   process 1 inside: a small file system in memory with a few directories of the machine, read-only; no
             network interface that is up; no capability; an unprivileged user of the machine

As root the user of the machine is another one (`uid`); otherwise it is whoever started this.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from typing import Any

from . import guard, keeper

CLONE_ALL = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mounts, control groups, host name, IPC, users, processes, network."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
_LOCKED = {1: MS_RDONLY, 2: MS_NOSUID, 4: MS_NODEV, 8: MS_NOEXEC, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of a mount as `statvfs` says them, and as `mount` wants them kept."""
USER = 1000
"""Inside."""
DEVICES = ("null", "zero", "full", "random", "urandom")


def main(arguments: list[str]) -> None:
    descriptor, parent, described = int(arguments[0]), int(arguments[1]), arguments[2]
    settings: dict[str, Any] = json.loads(described)
    guard.die_with_parent(parent)
    uid, gid = settings["uid"], settings["uid"]
    if uid is None:
        uid, gid = os.getuid(), os.getgid()
    _enter_namespaces(uid, gid)
    # While this is still whoever started it: a directory that others may not enter can be shown all the same.
    sources = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source, _ in settings["binds"]]
    devices = [os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in DEVICES]
    if os.getuid() != USER or os.getgid() != USER:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    guard.die_with_parent(parent)  # a change of user forgets it
    ready, hold = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready)
        os.close(descriptor)
        guard.drop_capabilities()
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.close(hold)
    guard.prctl(guard.PR_SET_PDEATHSIG, 9)
    if _is_closed(ready):  # its parent died before the line above
        os._exit(0)
    os.close(ready)
    _build_root(settings, sources, devices)
    guard.drop_capabilities()
    keeper.main(descriptor)


def _is_closed(descriptor: int) -> bool:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1) == b""
    except BlockingIOError:
        return False


def _enter_namespaces(uid: int, gid: int) -> None:
    """Somebody in the old ones has to say which user of the machine the one inside is."""
    go, said = os.pipe()
    this = os.getpid()
    helper = os.fork()
    if helper == 0:
        status = 1
        try:
            os.close(said)
            if os.read(go, 1):
                if os.getuid():
                    _write(f"/proc/{this}/setgroups", "deny")
                _write(f"/proc/{this}/gid_map", f"{USER} {gid} 1")
                _write(f"/proc/{this}/uid_map", f"{USER} {uid} 1")
                status = 0
        finally:
            os._exit(status)
    os.close(go)
    if guard.libc().unshare(CLONE_ALL):
        raise OSError(ctypes.get_errno(), "namespaces were refused")
    os.write(said, b"1")
    os.close(said)
    _, status = os.waitpid(helper, 0)
    if status:
        raise PermissionError("the users of the namespace could not be set")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() or None for text in (source, target, kind)]
    if guard.libc().mount(*arguments, ctypes.c_ulong(flags), options.encode() or None):
        error = ctypes.get_errno()
        raise OSError(error, f"{source or kind} could not be mounted at {target}: {os.strerror(error)}")


def _build_root(settings: dict[str, Any], sources: list[int], devices: list[int]) -> None:
    _mount("", "/", "", MS_REC | MS_PRIVATE)
    root = "/tmp"
    _mount("root", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for name in ("dev", "proc", "tmp", "old"):
        os.mkdir(f"{root}/{name}")
    # First: a directory that is shown may be one of /tmp.
    _mount("tmp", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={settings['tmp_bytes']},mode=700")
    for (_, target), source in zip(settings["binds"], sources, strict=True):
        os.makedirs(root + target, exist_ok=True)
        _mount(f"/proc/self/fd/{source}", root + target, "", MS_BIND | MS_REC)
        _make_readonly(root + target)
        os.close(source)
    for target, path in settings["links"]:
        os.symlink(target, root + path)
    for name, source in zip(DEVICES, devices, strict=True):
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{source}", f"{root}/dev/{name}", "", MS_BIND)
        os.close(source)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    # A container that hides parts of /proc does not allow another one; then there is none inside.
    with contextlib.suppress(OSError):
        _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(root)
    if guard.libc().pivot_root(b".", b"old"):
        raise OSError(ctypes.get_errno(), "the root of the sandbox could not be set")
    os.chdir("/")
    if guard.libc().umount2(b"/old", MNT_DETACH):
        raise OSError(ctypes.get_errno(), "the files of the machine could not be left")
    os.rmdir("/old")
    _make_readonly("/")
    os.chdir("/tmp")


def _make_readonly(path: str) -> None:
    found = os.statvfs(path).f_flag
    kept = sum(flag for bit, flag in _LOCKED.items() if found & bit)
    _mount("", path, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)
