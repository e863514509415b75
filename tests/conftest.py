"""Property tests try the same examples every time: a failure is a change, never a coincidence."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same", derandomize=True, database=None)
settings.load_profile("same")
