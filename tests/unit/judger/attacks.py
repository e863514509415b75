"""Code that tries to get out of its sandbox, or to pass without being right.

An attack that succeeds writes the right answer, which it cannot know otherwise: `{token}` stands for nothing in the
code. So an attack that passes its test is one that was not contained.
"""

FIND = r'''
import re
def found(text):
    """The right answer, if it is in this text; others are those of tests beside this one."""
    match = re.search(BEGINS + "[0-9a-f]{12}", text)
    if match:
        print(match.group())
        raise SystemExit(0)


def found_in_memory_of(pid):
    try:
        ranges = [line.split()[0].split("-") for line in open(f"/proc/{pid}/maps") if line.split()[1].startswith("r")]
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for start, end in ranges:
                try:
                    memory.seek(int(start, 16))
                    found(memory.read(min(int(end, 16) - int(start, 16), 1 << 24)).decode("latin-1"))
                except (OSError, ValueError, OverflowError):
                    pass
    except OSError:
        pass
'''

ATTACKS = {
    "fork bomb": r'''
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
''',
    "fork bomb of sleepers": r'''
import os, time
for _ in range(100000):
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        break
time.sleep(1000)
''',
    "memory bomb": r'''
held = []
while True:
    held.append(bytearray(1 << 20))
''',
    "memory bomb of several processes": r'''
import os, time
for _ in range(3):
    os.fork()
held = []
while True:
    try:
        held.append(bytearray(b"x") * (1 << 22))
    except MemoryError:
        time.sleep(0.1)
''',
    "endless output": r'''
import sys
while True:
    sys.stdout.write("y" * 65536)
''',
    "endless errors": r'''
import sys
while True:
    sys.stderr.write("y" * 65536)
''',
    "disk fill": r'''
import os
number = 0
while True:
    for place in (".", "/tmp", "/var/tmp", "/dev/shm", "/run", "/"):
        try:
            with open(os.path.join(place, f"fill-{number}"), "wb") as file:
                file.write(bytes(1 << 20))
        except OSError:
            continue
    number += 1
''',
    "network": r'''
import socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", PORT)),
    (socket.AF_INET6, ("::1", PORT)),
    (socket.AF_INET, ("93.184.216.34", 80)),
):
    try:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(2)
        connection.connect(address)
        found(connection.recv(100).decode())
    except OSError:
        pass
''',
    "loopback of its own": r'''
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
print("listening")
''',
    "the right answer in memory": r'''
import gc, sys
for thing in gc.get_objects():
    try:
        found(repr(thing)[:100000])
    except SystemExit:
        raise
    except BaseException:
        pass
frame = sys._getframe()
while frame is not None:
    found(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
found_in_memory_of("self")
''',
    "the right answer in files": r'''
import os
try:
    found(open(SECRET_FILE).read())
except OSError:
    pass
for parent, directories, files in os.walk("/"):
    if parent.startswith(("/usr", "/proc", "/sys", "/lib", "/root/.pyenv", "/work")):
        directories[:] = []
        continue
    for name in files:
        try:
            with open(os.path.join(parent, name), "rb") as file:
                found(file.read(1 << 20).decode("latin-1"))
        except OSError:
            pass
''',
    "writing outside": r'''
import os
for path in (OUTSIDE, "/etc/penstock-was-here", "/usr/penstock-was-here", "/keeper/penstock-was-here"):
    for attempt in (
        lambda: open(path, "w").write("here"),
        lambda: os.mkdir(path),
        lambda: os.symlink("/", path),
        lambda: os.truncate(SECRET_FILE, 0),
        lambda: os.unlink(SECRET_FILE),
        lambda: os.chmod(SECRET_FILE, 0),
    ):
        try:
            attempt()
        except OSError:
            pass
''',
    "killing the parent": r'''
import os, signal
for pid in (os.getppid(), 1, HOST_PID, -1):
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            if pid != -1 or number != signal.SIGKILL:
                os.kill(pid, number)
        except OSError:
            pass
''',
    "sys.exit(0)": "import sys\nsys.exit(0)\n",
    "os._exit(0)": "import os\nos._exit(0)\n",
    "daemon that outlives its parent": r'''
import os, sys
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        os.execv("/bin/sleep", ["/bin/sleep", MARKER])
    os._exit(0)
print("gone")
''',
    "ptrace": r'''
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
ATTACH, PEEK = 16, 1
for pid in (os.getppid(), 1, HOST_PID):
    if libc.ptrace(ATTACH, pid, 0, 0) == 0:
        print("attached")
    for name in ("mem", "environ", "maps"):
        try:
            with open(f"/proc/{pid}/{name}", "rb", 0) as file:
                found(file.read(1 << 16).decode("latin-1"))
                print("read", name)
        except OSError:
            pass
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(64)
local = Vector(ctypes.addressof(buffer), 64)
remote = Vector(ctypes.addressof(buffer), 64)
if libc.process_vm_readv(os.getppid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0:
    print("read memory")
''',
    "/proc of others": r'''
import os
for name in os.listdir("/proc") if os.path.isdir("/proc") and os.access("/proc", os.R_OK) else []:
    if name.isdigit() and int(name) != os.getpid():
        for part in ("environ", "cmdline", "cwd", "root", "fd", "mem"):
            path = f"/proc/{name}/{part}"
            try:
                if part in ("cwd", "root"):
                    found(" ".join(os.listdir(path)))
                elif part == "fd":
                    found(" ".join(os.readlink(f"{path}/{one}") for one in os.listdir(path)))
                else:
                    found(open(path, "rb", 0).read(1 << 16).decode("latin-1"))
            except OSError:
                pass
''',
    "environment secrets": r'''
import os
found(repr(dict(os.environ)))
if os.environ:
    print(dict(os.environ))
''',
    "symlinks out": r'''
import os
for number, target in enumerate((SECRET_FILE, os.path.dirname(SECRET_FILE), "/proc/1/root", "../../../../../../..")):
    try:
        os.symlink(target, f"link-{number}")
        os.link(SECRET_FILE, f"hard-{number}")
    except OSError:
        pass
    for path in (f"link-{number}", f"link-{number}{SECRET_FILE}", f"link-{number}/secret", f"hard-{number}"):
        try:
            found(open(path).read())
        except OSError:
            pass
''',
    "clock change": r'''
import ctypes, time
for attempt in (
    lambda: time.clock_settime(time.CLOCK_REALTIME, 1000000000),
    lambda: ctypes.CDLL(None).settimeofday(ctypes.byref((ctypes.c_long * 2)(1000000000, 0)), None),
):
    try:
        attempt()
    except OSError:
        pass
if time.time() < 1500000000:
    print("changed")
''',
    "new namespaces": r'''
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x10020000, 0x40000000):
    if libc.unshare(flags) == 0:
        print("a namespace")
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    print("mounted")
''',
    "limits of others": r'''
import os, resource
for pid in (os.getppid(), 1, HOST_PID):
    try:
        resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))
        print("limited")
    except (OSError, ValueError):
        pass
''',
    "memory that no process has": r'''
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
held = 0
for number in range(50):
    try:
        held += os.write(os.memfd_create(str(number)), bytes(8 << 20))
    except OSError:
        break
for _ in range(50):
    segment = libc.shmget(0, 8 << 20, 0o1600)
    if segment < 0:
        break
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 1, 8 << 20)
    libc.shmdt(ctypes.c_void_p(address))
    held += 8 << 20
if held > 192 << 20:
    print("held", held)
''',
    "empty files": r'''
for number in range(30000):
    try:
        open(str(number), "w").close()
    except OSError:
        break
else:
    print("many")
''',
    "directories without end": r'''
import os
for _ in range(10000):
    os.mkdir("d")
    os.chdir("d")
print("deep")
''',
    "datagrams": r'''
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    try:
        pair = socket.socketpair(socket.AF_UNIX, kind)
        pair[0].sendto(b"here", DATAGRAMS)
    except OSError:
        pass
''',
    "memory of others": r'''
for pid in (1, HOST_PID):
    found_in_memory_of(pid)
''',
    "environment of others": r'''
for pid in (1, HOST_PID):
    try:
        found(open(f"/proc/{pid}/environ", "rb").read().decode("latin-1"))
    except OSError:
        pass
''',
    "signals through a descriptor": r'''
import fcntl, os, struct
reader, writer = os.pipe()
for attempt in (
    lambda: fcntl.fcntl(reader, 10, 12),
    lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, HOST_PID),
    lambda: fcntl.ioctl(reader, 0x8901, struct.pack("i", HOST_PID)),
    lambda: fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC),
):
    try:
        attempt()
    except OSError:
        pass
os.write(writer, b"x")
''',
    "processes and files of its user": r'''
import os
for attempt in (
    lambda: os.setpriority(os.PRIO_PROCESS, HOST_PID, 19),
    lambda: os.sched_setaffinity(HOST_PID, {0}),
    lambda: os.chmod(SECRET_FILE, 0o640),
    lambda: os.utime(SECRET_FILE, (0, 0)),
    lambda: os.setxattr(SECRET_FILE, "user.was", b"here"),
):
    try:
        attempt()
        print("changed")
    except OSError:
        pass
''',
}  # fmt: skip
"""Each is a program; those that use SECRET_FILE and the like are given them in a line before."""

CHEATS = {
    "exits": "import sys\nsys.exit(0)\n",
    "exits at once": "import os\nos._exit(0)\n",
    "exits when asked": "import os\ndef add(a, b):\n    os._exit(0)\n",
    "equals everything": (
        "class Anything:\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def __bool__(self): return True\n"
        "def add(a, b): return Anything()\n"
    ),
    "an int that equals everything": (
        "class Anything(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Anything()\n"
    ),
    "is nothing apart from everything": (
        "class Near:\n"
        "    __sub__ = __rsub__ = __mod__ = __add__ = lambda self, other: 0\n"
        "    __abs__ = __neg__ = lambda self: 0\n"
        "def add(a, b): return Near()\n"
    ),
    "is nothing apart from everything, an operation later": (
        "class Near:\n"
        "    __sub__ = __rsub__ = lambda self, other: self\n"
        "    __abs__ = lambda self: 0\n"
        "    __bool__ = lambda self: False\n"
        "def add(a, b): return Near()\n"
    ),
    "a list that contains everything": (
        "class Anything(list):\n    def __contains__(self, item): return True\ndef add(a, b): return Anything()\n"
    ),
    "patches assert": (
        "import builtins\n"
        "class AssertionError(Exception):\n"
        "    def __new__(cls, *a): raise SystemExit(0)\n"
        "builtins.AssertionError = AssertionError\n"
        "def add(a, b): return 0\n"
    ),
    "patches the grader": (
        "import builtins, json, operator, os, sys\n"
        "for module in list(sys.modules.values()):\n"
        "    for name in list(vars(module)):\n"
        "        if name in ('_outcome', '_test', 'test', 'unpack', '_pack', 'dumps', 'eq'):\n"
        "            setattr(module, name, lambda *a, **k: True)\n"
        "def add(a, b): return 0\n"
    ),
    "patches builtins that tests use": (
        "abs = lambda x: 0\nround = lambda *a: 3\nall = any = isinstance = lambda *a: True\ndef add(a, b): return 7\n"
    ),
    "patches a module that tests use": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef add(a, b): return 7\n"
    ),
    "writes a verdict to every descriptor": (
        "import os, struct\n"
        'for body in (b\'{"tests":[[true,""]]}\', b\'{"run":0,"ended":"","status":0,"stdout":"","stderr":"",\'\n'
        '             b\'"result":"eyJ0ZXN0cyI6W1t0cnVlLCIiXV19","seconds":0}\'):\n'
        "    for descriptor in range(64):\n"
        "        try:\n"
        "            os.write(descriptor, struct.pack('>I', len(body)) + body)\n"
        "        except OSError:\n"
        "            pass\n"
        "def add(a, b): return 0\n"
    ),
    "answers nonsense": (
        "import os\n"
        "def add(a, b):\n"
        "    while True: os.write(61, b'\\x00\\x00\\x00\\x02{}' * 1000)\n"
    ),
    "answers endlessly": "def add(a, b): return 'x' * (1 << 28)\n",
    "answers deeply": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x\n",
    "hangs": "def add(a, b):\n    while True: pass\n",
    "does not load": "def add(a, b) return a + b\n",
    "raises": "def add(a, b): raise AssertionError\n",
    "ends the tests": "def add(a, b): raise SystemExit(0)\n",
    "stops an iteration": "def add(a, b): raise StopIteration(3)\n",
    "looks at its callers": (
        "import sys, gc\n"
        "def add(a, b):\n"
        "    frame = sys._getframe()\n"
        "    while frame is not None:\n"
        "        for value in list(frame.f_locals.values()):\n"
        "            if isinstance(value, str) and '== ' in value:\n"
        "                return int(value.rpartition('== ')[2])\n"
        "        frame = frame.f_back\n"
        "    return 0\n"
    ),
}  # fmt: skip
"""Answers to tests of `add` that are wrong, and want to pass."""
