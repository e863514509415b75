"""What can go wrong, one type per boundary.

    PenstockError
    ├── RefusedError              refused before anything ran; the CLI exits 2
    │   ├── ConfigError           a configuration that cannot work, all problems at once
    │   ├── DatasetError          rows that cannot be used, each with file:line
    │   ├── ModelError            a model that cannot be had or does not fit
    │   ├── LedgerError           a ledger that is damaged, of another format, or held by another process
    │   └── CheckpointError       no checkpoint that is whole, or not the one that was asked for
    ├── RolloutFailure            belongs to one rollout; becomes a `Failure` on its record, never a reward
    │   ├── InfrastructureFailure   another try may help: engine, network, worker process (budget 3)
    │   └── DataFailure             this prompt or this answer is the cause (budget 1)
    ├── Interrupted               not a failure: a pause reached the rollout; its record continues later
    └── RunError                  the run cannot go on; the CLI exits 1
        ├── NotReady              a batch was asked for before its groups were complete
        ├── DeadlineExceeded      a wait ended; names the stage and the rollout
        ├── UserFunctionError     a user's hook raised; names the function
        ├── CircuitOpen           too many rollouts fail; the run stops instead of eating the dataset
        ├── EngineUnavailable     no engine is left, with the last failure of each
        ├── WeightSyncError       no engine confirmed the new weights
        ├── StepRefused           loss or gradient not finite; the weights are unchanged
        │   └── RankLost            a train rank was lost in it; the ranks are back, as they were before it
        ├── StateLost             the train ranks and the weights after the last checkpoint are lost
        ├── RanksUnavailable      the train ranks do not start, or were lost too often
        ├── StorageError          a write failed; what was acknowledged before is still there
        └── IllegalTransition     a group was asked to do what its state forbids; carries its story

Retries are decided by `InfrastructureFailure` and `DataFailure` alone, and counted per rollout in `produce/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.rollout import Failure, FailureReason


class PenstockError(Exception):
    """Base of everything Penstock raises on purpose."""


class RefusedError(PenstockError):
    """Refused before anything ran. `problems` lists every one that was found."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(RefusedError):
    """A configuration that cannot work, with all its problems."""


class DatasetError(RefusedError):
    pass


class ModelError(RefusedError):
    pass


class LedgerError(RefusedError):
    pass


class CheckpointError(RefusedError):
    pass


class RolloutFailure(PenstockError):
    """One rollout's attempt failed. `reason` is a stable word for metrics; the message is for people.

    What a user's own loop or tool raises needs no reason.
    """

    infrastructure = False

    def __init__(self, message: str, *, reason: FailureReason = FailureReason.AGENT_LOOP_ERROR) -> None:
        super().__init__(message)
        self.reason = FailureReason(reason)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels between processes as itself: the reason is no positional argument."""
        return _rebuilt, (type(self), str(self), self.reason)

    def as_failure(self) -> Failure:
        return Failure(reason=self.reason, message=str(self), infrastructure=self.infrastructure)


class InfrastructureFailure(RolloutFailure):
    """Another try may help: an engine, the network, a worker process."""

    infrastructure = True


class DataFailure(RolloutFailure):
    """This prompt or this answer is the cause; tried once more."""


class Interrupted(PenstockError):
    """A pause reached this rollout. The agent loop's base class keeps the record so far as ABORTED."""


class RunError(PenstockError):
    """The run cannot go on."""


class NotReady(RunError):
    pass


class DeadlineExceeded(RunError):
    pass


class UserFunctionError(RunError):
    pass


class CircuitOpen(RunError):
    pass


class EngineUnavailable(RunError):
    pass


class WeightSyncError(RunError):
    pass


class StepRefused(RunError):
    pass


class RankLost(StepRefused):
    pass


class StateLost(RunError):
    pass


class RanksUnavailable(RunError):
    pass


class StorageError(RunError):
    pass


class IllegalTransition(RunError):
    pass


def _rebuilt(kind: type[RolloutFailure], message: str, reason: FailureReason) -> RolloutFailure:
    return kind(message, reason=reason)
