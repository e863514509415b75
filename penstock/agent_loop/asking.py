"""What a transcript asks of an engine: whom, as whom, and with which random numbers."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

import msgspec

from penstock.ports import Completion, Engine, GenerateRequest, OnPause, Tokenizer, TurnLog, check_completion, joined
from penstock.rollout import RolloutState, SampleParams

OnPiece = Callable[[Completion], None]
"""Told of each piece of an answer as it is made."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a transcript asks, and as whom: the same for all rollouts of an agent loop."""

    engine: Engine
    tokenizer: Tokenizer
    sample_params: SampleParams
    run_seed: int = 0
    namespace: str = ""
    """Before the ids of requests, where others share the engine."""
    on_pause: OnPause = "abort"
    turn_log: TurnLog | None = None
    """Where finished turns are kept while the rollout is still played."""

    def request(
        self, rollout: RolloutState, segment: int, params: SampleParams, *, ids: bytes, begun: int
    ) -> GenerateRequest:
        """For the answer that goes on after `ids`, the tokens of a segment, of which the last `begun` are its own.

        The i-th random number is a function of the segment's seed and of i, counted over its tokens.
        """
        split = len(ids) - 4 * begun
        return GenerateRequest(
            request_id=f"{self.namespace}{rollout.rollout_id}" + (f"#{segment}" if segment else ""),
            prompt_ids=(rollout.context_ids(segment) if rollout.segments else rollout.prompt.ids) + ids[:split],
            response_ids=ids[split:],
            params=params,
            seed=rollout_seed(self.run_seed, rollout, segment),
            first_uniform=len(ids) // 4,
            group_id=self.namespace + rollout.group_id,
            on_pause=self.on_pause,
        )

    async def answer(self, request: GenerateRequest, on_piece: OnPiece | None) -> Completion:
        """The whole answer; with `on_piece`, told piece by piece meanwhile. Raises like `Engine.generate`."""
        if on_piece is None:
            completion = await self.engine.generate(request)
        else:
            pieces = []
            async with contextlib.aclosing(self.engine.stream(request)) as stream:
                async for piece in stream:
                    pieces.append(piece)
                    on_piece(piece)
            completion = joined(pieces)
        check_completion(completion, request)
        return completion


def rollout_seed(run_seed: int, rollout: RolloutState, segment: int = 0) -> int:
    """Of the run's seed, the rollout's id, how often it was started, and the segment; siblings never share one."""
    text = f"{run_seed}/{rollout.rollout_id}/{rollout.num_tries}/{rollout.data_failures}"
    if segment:
        text += f"#{segment}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
