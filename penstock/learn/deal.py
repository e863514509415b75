"""Which rank trains which answers: by the tokens it has to compute, the same on every rank that asks.

Whole groups first, the most expensive to whoever has least, so that a prompt is computed once. Then single answers move
from the most to the least loaded rank while that makes the longest part shorter; a prompt is computed on every rank
that has one of its answers.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.learn.batch import TrainAnswer, TrainBatch

Prompt = bytes


class _Hand:
    """What one rank has."""

    def __init__(self) -> None:
        self.answers: set[int] = set()
        self.prompts: Counter[Prompt] = Counter()
        self.load = 0


class _Dealer:
    def __init__(self, batch: TrainBatch, num_ranks: int, every_token: bool) -> None:
        self.hands = [_Hand() for _ in range(num_ranks)]
        self.groups: list[list[int]] = []
        self.costs: list[int] = []
        self.prompts: list[Prompt] = []
        for group in batch.groups:
            first = len(self.costs)
            self.costs += [_cost(answer, every_token) for answer in group.answers]
            self.prompts += [group.prompt_ids.tobytes()] * len(group.answers)
            self.groups.append(list(range(first, len(self.costs))))

    def added(self, hand: _Hand, answer: int) -> int:
        """What this answer would cost here, with its prompt if that is new."""
        cost, prompt = self.costs[answer], self.prompts[answer]
        return cost + (len(prompt) // 4 if cost and not hand.prompts[prompt] else 0)

    def removed(self, hand: _Hand, answer: int) -> int:
        cost, prompt = self.costs[answer], self.prompts[answer]
        return cost + (len(prompt) // 4 if cost and hand.prompts[prompt] == 1 else 0)

    def give(self, hand: _Hand, answer: int) -> None:
        hand.load += self.added(hand, answer)
        hand.answers.add(answer)
        hand.prompts[self.prompts[answer]] += bool(self.costs[answer])

    def take(self, hand: _Hand, answer: int) -> None:
        hand.load -= self.removed(hand, answer)
        hand.answers.remove(answer)
        hand.prompts[self.prompts[answer]] -= bool(self.costs[answer])

    def deal_groups(self) -> None:
        for group in sorted(self.groups, key=lambda group: -sum(self.costs[answer] for answer in group)):
            hand = min(self.hands, key=lambda hand: hand.load)
            for answer in group:
                self.give(hand, answer)

    def even_out(self) -> None:
        while True:
            longest = max(self.hands, key=lambda hand: hand.load)
            shortest = min(self.hands, key=lambda hand: hand.load)
            after = {
                answer: max(longest.load - self.removed(longest, answer), shortest.load + self.added(shortest, answer))
                for answer in sorted(longest.answers)
                if self.costs[answer]
            }
            best = min(after, key=after.__getitem__, default=None)
            # It ends: with each move the longest of these two becomes shorter, and no other longer.
            if best is None or after[best] >= longest.load:
                return
            self.take(longest, best)
            self.give(shortest, best)


def deal(
    batch: TrainBatch, num_ranks: int, *, every_token: bool = False
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """For every rank the indices of its answers, in order; each answer exactly once, a rank may have none."""
    dealer = _Dealer(batch, num_ranks, every_token)
    dealer.deal_groups()
    dealer.even_out()
    return [np.asarray(sorted(hand.answers), dtype=np.int64) for hand in dealer.hands]


def _cost(answer: TrainAnswer, every_token: bool) -> int:
    """Tokens to compute; an answer of which none is trained costs nothing."""
    return sum(len(segment) for segment in answer.segments) if every_token or answer.num_trained else 0
