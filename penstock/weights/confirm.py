"""A sync is done when the engine says so: the model step it serves, and the checksum of what it received."""

from __future__ import annotations

from penstock.errors import WeightSyncError
from penstock.ports import Engine, LoadedWeights, WeightSource


async def load_confirmed(engine: Engine, source: WeightSource, model_step: int) -> LoadedWeights:
    """Returns what `engine` says it received when it serves `model_step`. Raises WeightSyncError when it does not.

    Whether that is what was sent is for the sender to compare: see `compare_checksums`.
    """
    loaded = await engine.load_weights(source, model_step)
    served = await engine.model_step()
    if served != model_step:
        raise WeightSyncError(f"weights {model_step}: the engine serves {served}")
    return loaded if loaded is not None else LoadedWeights(model_step=model_step)


def compare_checksums(model_step: int, sent: str, received: str | None) -> None:
    """Raises WeightSyncError unless the receiver computed the sender's checksum from the bytes it received."""
    if received != sent:
        raise WeightSyncError(
            f"weights {model_step}: sent {sent}, received {received or 'bytes that nobody summed up'}"
        )


def late(model_step: int, timeout_s: float) -> WeightSyncError:
    return WeightSyncError(f"weights {model_step}: no confirmation within {timeout_s:g} s")
