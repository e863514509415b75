"""refeed: every answer of a recorded rollout, asked again by itself from the recorded tokens before it.

What was recorded greedily must come back token for token; for sampled answers the engine scores the recorded tokens,
and its logprobs must agree with the recorded ones within a stated mismatch. Either fails when the record is not what
the model saw: a token lost at a seam, a conversation that was tokenised again, a turn out of place.

    refed = await refeed(engine, rollouts, greedy=True)
    refed = await refeed(engine, rollouts, greedy=False, tolerance=0.02)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.ports import Engine, GenerateRequest
from penstock.rollout import FloatArray, RolloutState, SampleParams, unpack_ids


class RefeedMismatch(PenstockError):
    """The record is not what the model saw, or the engine does not answer as it did."""


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer on record, and all that stood before it."""

    rollout_id: str
    turn: int
    """Its place in the rollout's turns."""
    prompt_ids: bytes
    ids: bytes
    logprobs: FloatArray
    steps: frozenset[int]
    """The weights that made it."""

    def __str__(self) -> str:
        return f"turn {self.turn} of rollout {self.rollout_id!r}"


class Refed(msgspec.Struct, frozen=True, kw_only=True):
    answers: int
    tokens: int
    largest_mismatch: float = 0.0
    """Of a logprob; 0 where ids were compared."""


def recorded_answers(rollout: RolloutState) -> Iterator[RecordedAnswer]:
    """In the order in which they were recorded."""
    written: Counter[int] = Counter()
    for number, turn in enumerate(rollout.turns):
        begin, end = written[turn.segment], written[turn.segment] + turn.num_tokens
        written[turn.segment] = end
        if turn.kind != "generate" or not turn.num_tokens:
            continue
        tokens = rollout.segments[turn.segment].tokens
        yield RecordedAnswer(
            rollout_id=rollout.rollout_id,
            turn=number,
            prompt_ids=rollout.context_ids(turn.segment) + tokens.ids[: 4 * begin],
            ids=tokens.ids[4 * begin : 4 * end],
            logprobs=np.frombuffer(tokens.logprobs, dtype=np.float32)[begin:end],
            steps=frozenset(tokens.model_steps[begin:end].tolist()),
        )


async def refeed(engine: Engine, rollouts: Iterable[RolloutState], *, greedy: bool, tolerance: float = 0.0) -> Refed:
    """Ask an engine that serves the weights of the record for every answer again, one at a time.

    `greedy`: the answers were made at temperature 0, and must be identical. Otherwise they were sampled at temperature
    1, and each logprob must be within `tolerance`. Raises RefeedMismatch with the rollout, the turn and the token;
    ValueError when there is no answer, or one of other weights than the engine's.
    """
    served = await engine.model_step()
    answers = tokens = 0
    largest = 0.0
    for answer in (answer for rollout in rollouts for answer in recorded_answers(rollout)):
        if answer.steps != {served}:
            raise ValueError(f"{answer} was made by weights {sorted(answer.steps)}; the engine serves {served}")
        if greedy:
            await _ask_again(engine, answer)
        else:
            largest = max(largest, await _score(engine, answer, tolerance))
        answers += 1
        tokens += len(answer.ids) // 4
    if not answers:
        raise ValueError("there is no answer on record to ask again")
    return Refed(answers=answers, tokens=tokens, largest_mismatch=largest)


async def _ask_again(engine: Engine, answer: RecordedAnswer) -> None:
    ids = unpack_ids(answer.ids)
    completion = await engine.generate(
        GenerateRequest(
            request_id=f"refeed/{answer.rollout_id}/{answer.turn}",
            prompt_ids=answer.prompt_ids,
            params=SampleParams(temperature=0.0, max_tokens=len(ids)),
            seed=0,
            on_pause="serve",
        )
    )
    again = unpack_ids(completion.ids)
    same = min(len(ids), len(again))
    different = np.nonzero(ids[:same] != again[:same])[0]
    if len(different) or len(ids) != len(again):
        place = int(different[0]) if len(different) else same
        now = int(again[place]) if place < len(again) else "nothing"
        was = int(ids[place]) if place < len(ids) else "nothing"
        raise RefeedMismatch(f"{answer}: token {place} of {len(ids)} is {was} on record and {now} when asked again")


async def _score(engine: Engine, answer: RecordedAnswer, tolerance: float) -> float:
    scores = np.frombuffer(await engine.score(answer.prompt_ids + answer.ids), dtype=np.float32)
    mismatch = np.abs(scores[-len(answer.logprobs) :] - answer.logprobs)
    place = int(mismatch.argmax())
    if not mismatch[place] <= tolerance:
        raise RefeedMismatch(
            f"{answer}: token {place} of {len(mismatch)} has logprob {answer.logprobs[place]:.4f} on record and "
            f"{scores[place - len(mismatch)]:.4f} when it is scored; they may differ by {tolerance:g}"
        )
    return float(mismatch[place])
