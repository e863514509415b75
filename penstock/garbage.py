"""The garbage collector of a process that has loaded what it needs."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """What was loaded stays: from now on the collector passes it by.

    To look through all that torch and transformers import would stop everything for 0.2 s each time. May be called
    again after more was loaded; `gc.unfreeze()` takes it back.
    """
    gc.collect()
    gc.freeze()
