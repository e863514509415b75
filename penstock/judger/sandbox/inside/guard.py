"""What a process gives up before it runs code that nobody has read: limits, files, system calls.

`confine` is called in the child that runs the code, right before it does; there is no way back. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
AF_UNIX = 1
EPERM, ENOSYS = 1, 38


class Limits(NamedTuple):
    """Of one run."""

    timeout_s: float
    """By the clock."""
    cpu_s: float
    """Of computing, by one process; a busy machine does not take it away."""
    max_memory: int
    """Bytes, of each process and of all together."""
    max_processes: int
    max_output: int
    """Bytes that are read of what it prints."""
    max_files_bytes: int
    """Of all files it writes."""
    namespaces: bool
    """Whether it has processes, files and a network of its own; if not, more system calls are refused."""
    readable: Sequence[str] = ()
    """Without namespaces: the directories it may read, besides its own."""
    files: bool = True
    """Whether it may open any. False where neither namespaces nor Landlock tell its files from others'."""


def prctl(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    return int(_libc.prctl(option, *padded))


def confine(limits: Limits) -> None:
    """Raises OSError when something that every Linux has cannot be given up."""
    _limit_resources(limits)
    if prctl(PR_SET_NO_NEW_PRIVS, 1):
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")
    signals_are_scoped = False
    if not limits.namespaces:
        signals_are_scoped = landlock(limits.readable, os.getcwd())
    seccomp(
        network_too=not limits.namespaces,
        own_signals_only=not limits.namespaces and not signals_are_scoped,
        files_too=not limits.files,
    )
    # Its own memory is its own again: what the keeper had is closed or forgotten.
    prctl(PR_SET_DUMPABLE, 1)


def _limit_resources(limits: Limits) -> None:
    seconds = max(1, round(limits.cpu_s))
    # The signal that says so comes a second before the one that cannot be caught.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for name, value in (
        ("RLIMIT_AS", limits.max_memory),
        ("RLIMIT_NPROC", limits.max_processes),
        ("RLIMIT_FSIZE", limits.max_files_bytes),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MEMLOCK", 0),
        ("RLIMIT_MSGQUEUE", 0),
    ):
        number = getattr(resource, name, None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (bound, bound))


# System calls that are refused: by number, for the two machines there are.

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = """
    ptrace 101 117             process_vm_readv 310 270   process_vm_writev 311 271  kcmp 312 272
    mount 165 40               umount2 166 39             pivot_root 155 41          chroot 161 51
    unshare 272 97             setns 308 268              open_tree 428 428          move_mount 429 429
    fsopen 430 430             fsconfig 431 431           fsmount 432 432            fspick 433 433
    mount_setattr 442 442      bpf 321 280                perf_event_open 298 241    userfaultfd 323 282
    keyctl 250 219             add_key 248 217            request_key 249 218        name_to_handle_at 303 264
    open_by_handle_at 304 265  settimeofday 164 170       clock_settime 227 112      adjtimex 159 171
    clock_adjtime 305 266      swapon 167 224             swapoff 168 225            reboot 169 142
    sethostname 170 161        setdomainname 171 162      init_module 175 105        finit_module 313 273
    delete_module 176 106      kexec_load 246 104         kexec_file_load 320 294    acct 163 89
    quotactl 179 60            io_uring_setup 425 425     io_uring_enter 426 426     io_uring_register 427 427
    pidfd_getfd 438 438        process_madvise 440 440    shmget 29 194              semget 64 190
    msgget 68 186              mq_open 240 180            memfd_create 319 279       memfd_secret 447 447
"""
# Memory that nobody's resident pages show is among them. Below, what reaches others of the same user: their processes,
# and what Landlock does not watch of their files.
_REFUSED_WITHOUT_NAMESPACES = """
    setsid 112 157             setpgid 109 154            pidfd_open 434 434         setpriority 141 140
    sched_setaffinity 203 122  sched_setscheduler 144 119 sched_setparam 142 118     sched_setattr 314 274
    ioprio_set 251 30          migrate_pages 256 238      move_pages 279 239         chmod 90 -1
    fchmod 91 52               fchmodat 268 53            fchmodat2 452 452          chown 92 -1
    fchown 93 55               lchown 94 -1               fchownat 260 54            utime 132 -1
    utimes 235 -1              futimesat 261 -1           utimensat 280 88           setxattr 188 5
    lsetxattr 189 6            fsetxattr 190 7            setxattrat 463 463         removexattr 197 14
    lremovexattr 198 15        fremovexattr 199 16        removexattrat 466 466
"""
_REFUSED_WITHOUT_SCOPE = """
    tkill 200 130              rt_sigqueueinfo 129 138    rt_tgsigqueueinfo 297 240  pidfd_send_signal 424 424
"""
_REFUSED_WITHOUT_FILES = """
    open 2 -1                  openat 257 56              openat2 437 437            creat 85 -1
    truncate 76 45             rename 82 -1               renameat 264 38            renameat2 316 276
    mkdir 83 -1                mkdirat 258 34             rmdir 84 -1                unlink 87 -1
    unlinkat 263 35            link 86 -1                 linkat 265 37              symlink 88 -1
    symlinkat 266 36           mknod 133 -1               mknodat 259 33             readlink 89 -1
    readlinkat 267 78          execve 59 221              execveat 322 281           uselib 134 -1
"""
_NUMBERS = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "clone3": (435, 435),
    "prlimit64": (302, 261),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
}
_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}
_NEW_NAMESPACE = 0x7E020000
"""Flags of `clone` that make namespaces."""
_DATAGRAMS = 2
"""The bit of such types of sockets: even one of a pair reaches whoever listens at a path of the machine."""
_OWNERS = {"fcntl": (8, 10, 15), "ioctl": (0x8901, 0x8902)}
"""What says to whom a descriptor sends signals, and which."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
"""Where these stand in what a filter looks at."""


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _numbers(table: str, column: int) -> list[int]:
    """Those that this machine has."""
    words = table.split()
    return [int(number) for number in words[1 + column :: 3] if int(number) >= 0]


def seccomp_filter(
    machine: str, *, network_too: bool, own_signals_only: bool, files_too: bool = False, pid: int
) -> bytes:
    """A program for the kernel: allow what is not listed. Another machine's system calls end the process."""
    column = list(_ARCHES).index(machine)
    tables = [_REFUSED]
    if network_too:
        tables.append(_REFUSED_WITHOUT_NAMESPACES)
    if own_signals_only:
        tables.append(_REFUSED_WITHOUT_SCOPE)
    if files_too:
        tables.append(_REFUSED_WITHOUT_FILES)
    steps = [_step(_LOAD, _ARCH), _step(_EQUAL, _ARCHES[machine], 1), _step(_RETURN, _KILL), _step(_LOAD, _NUMBER)]
    if machine == "x86_64":
        steps += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _KILL)]  # the calls of x32
    for number in (number for table in tables for number in _numbers(table, column)):
        steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | EPERM)]
    # Its flags cannot be looked at, so it is not there; the C library goes on with `clone`.
    steps += [_step(_EQUAL, _NUMBERS["clone3"][column], 0, 1), _step(_RETURN, _ERRNO | ENOSYS)]
    bits = [(_NUMBERS["clone"][column], _FIRST_ARGUMENT, _NEW_NAMESPACE)]
    if network_too:
        bits.append((_NUMBERS["socketpair"][column], _SECOND_ARGUMENT, _DATAGRAMS))
    for number, argument, refused in bits:
        steps += [
            _step(_EQUAL, number, 0, 4),
            _step(_LOAD, argument),
            _step(_ANY_BIT, refused, 0, 1),
            _step(_RETURN, _ERRNO | EPERM),
            _step(_RETURN, _ALLOW),
        ]
    only = [(_NUMBERS["socket"][column], -1 if network_too else AF_UNIX), (_NUMBERS["prlimit64"][column], 0)]
    if own_signals_only:
        only += [(number[column], pid) for number in _SIGNALS.values()]
        for name, refusals in _OWNERS.items():
            steps += [_step(_EQUAL, _NUMBERS[name][column], 0, 2 * len(refusals) + 2), _step(_LOAD, _SECOND_ARGUMENT)]
            for refusal in refusals:
                steps += [_step(_EQUAL, refusal, 0, 1), _step(_RETURN, _ERRNO | EPERM)]
            steps.append(_step(_RETURN, _ALLOW))
    for number, first_argument in only:
        steps += [
            _step(_EQUAL, number, 0, 4),
            _step(_LOAD, _FIRST_ARGUMENT),
            _step(_EQUAL, first_argument & 0xFFFFFFFF, 1),
            _step(_RETURN, _ERRNO | EPERM),
            _step(_RETURN, _ALLOW),
        ]
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def seccomp(*, network_too: bool, own_signals_only: bool, files_too: bool) -> None:
    """Raises OSError where the kernel or the machine has no such thing."""
    machine = platform.machine()
    if machine not in _ARCHES or sys.maxsize < 2**32:
        raise OSError(ENOSYS, f"no list of system calls for {machine}")
    program = seccomp_filter(
        machine, network_too=network_too, own_signals_only=own_signals_only, files_too=files_too, pid=os.getpid()
    )
    steps = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

    prepared = Program(len(program) // 8, ctypes.addressof(steps))
    if prctl(PR_SET_SECCOMP, 2, ctypes.addressof(prepared)):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")


# Landlock: which files a process may touch. Of use where it has no file system of its own.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a directory
_ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # the rights there are on what is no directory
_ALL_BY_VERSION = ((1, 0x1FFF), (2, 0x3FFF), (3, 0x7FFF), (5, 0xFFFF))
_SCOPE_VERSION = 6
_SCOPED = 1 << 0 | 1 << 1  # abstract sockets and signals end at the sandbox


def landlock_version() -> int:
    """0 where there is none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def landlock(readable: Sequence[str], writable: str) -> bool:
    """Touch no file but these. Returns whether signals to others are refused too. Does nothing where it is absent."""
    version = landlock_version()
    if not version:
        return False
    handled = max(bits for since, bits in _ALL_BY_VERSION if version >= since)
    words = [handled] + ([0, _SCOPED] if version >= _SCOPE_VERSION else [])
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = int(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock was refused")
    devices = [
        (name, _READ | 1 << 1) for name in ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")
    ]
    for path, access in [(writable, handled), *((name, _READ) for name in readable), *devices]:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            _allow(ruleset, path, access & handled)
    if _libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)):
        raise OSError(ctypes.get_errno(), "landlock was refused")
    os.close(ruleset)
    return version >= _SCOPE_VERSION


def _allow(ruleset: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            access &= _ON_FILES
        rule = struct.pack("=Qi", access, descriptor)
        if _libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0)):
            raise OSError(ctypes.get_errno(), f"landlock refused a rule for {path}")
    finally:
        os.close(descriptor)


def drop_capabilities() -> None:
    """All of them, for good. Raises OSError."""
    for capability in range(64):
        if prctl(PR_CAPBSET_DROP, capability) and capability < 8:
            raise OSError(ctypes.get_errno(), "the capabilities could not be dropped")
    header = struct.pack("=Ii", 0x20080522, 0)
    if _libc.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "the capabilities could not be dropped")


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when its parent dies; it may have died already."""
    prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() not in (parent, 0):
        os._exit(0)


def libc() -> Any:
    return _libc
