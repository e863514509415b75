"""A reasoning-gym task over several turns: the model may try again when its answer is not right."""

from __future__ import annotations

from typing import Any

from penstock.judger.rewards import reasoning_gym_score


class ReasoningGymEnv:
    """For rows of `ReasoningGymConfig`. The reward is the task's own score of the last try."""

    def __init__(self, tries: int = 3, again: str = "That is not right. Try again.") -> None:
        self._tries = tries
        self._again = again
        self._left = tries
        self._row: dict[str, Any] = {}

    def reset(self, row: dict[str, Any]) -> None:
        self._left = self._tries
        self._row = row

    def step(self, answer: str) -> tuple[str, float, bool]:
        self._left -= 1
        score = reasoning_gym_score(answer, self._row["ground_truth"], self._row["extra_info"])
        if score >= 1.0 or not self._left:
            return "", score, True
        return self._again, 0.0, False
