"""Reply: one answer as it is made, for the request that asked for it and for those that ask for it again."""

from __future__ import annotations

from penstock.agent_loop.session.requests import Asking, Finished, Refused
from penstock.agent_loop.session.tree import Recorded
from penstock.replay.signal import Signal


class Reply:
    """Made by a task of the session's, whoever still listens: a client that lost its connection asks again."""

    def __init__(self, asking: Asking, answer_id: str, prompt_tokens: int) -> None:
        self.asking = asking
        self.answer_id = answer_id
        self.prompt_tokens = prompt_tokens
        self.pieces: list[str] = []
        """Of its text, as it is made."""
        self.changed = Signal()
        """Notified with every piece, and when it is over."""
        self.recorded: Recorded | None = None
        """Set when the answer is on record."""
        self.lost = False
        """The client that waited for it is gone, and none has asked for it again."""
        self._finished: Finished | None = None
        self._refused: Refused | None = None

    @property
    def is_over(self) -> bool:
        return self._finished is not None or self._refused is not None

    @property
    def failed(self) -> bool:
        return self._refused is not None

    def result(self) -> Finished:
        """Of one that is over. Raises Refused."""
        if self._refused is not None:
            raise self._refused
        assert self._finished is not None, "it is not over"
        return self._finished

    def delivered(self) -> None:
        """The client has it."""
        assert self.recorded is not None, "it is not on record"
        self.recorded.received = True

    # The session's side.

    def say(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.changed.notify()

    def finish(self, answer: Finished, recorded: Recorded) -> None:
        self._finished, self.recorded = answer, recorded
        self.changed.notify()

    def refuse(self, refused: Refused) -> None:
        self._refused = refused
        self.changed.notify()
