"""The program that becomes an agent's: it ends when the run does, however that ends.

    python launch.py PARENT COMMAND [ARGUMENT ...]

Only the standard library is imported: it is there before the agent is.
"""

import os
import signal
import sys


def die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
