"""A sync is done when the engine says so: the model step it serves, and the checksum of what it received."""

from __future__ import annotations

from penstock.errors import WeightSyncError
from penstock.ports import Engine, WeightSource


async def load_confirmed(engine: Engine, source: WeightSource, model_step: int, checksum: str | None = None) -> None:
    """Returns when `engine` serves `model_step` and received the bytes of `checksum`. Raises WeightSyncError."""
    loaded = await engine.load_weights(source, model_step)
    if checksum is not None and loaded is not None and loaded.checksum != checksum:
        raise WeightSyncError(f"weights {model_step}: sent {checksum}, the engine received {loaded.checksum}")
    served = await engine.model_step()
    if served != model_step:
        raise WeightSyncError(f"weights {model_step}: the engine serves {served}")
