"""Everything at once, forty times."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from engine_fakes import ON_PAUSE, Kept, Live, nonsense, play, request

from penstock.engine.controller import RolloutController
from penstock.errors import (
    EngineUnavailable,
    InfrastructureFailure,
    PenstockError,
    WeightSyncError,
)
from penstock.ports import Completion


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_every_request_ends_and_no_token_carries_weights_that_were_not_published(seed: int) -> None:
    chance = random.Random(seed)

    async def trouble(engines: dict[str, Any]) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(0.2))
            engine = engines[chance.choice(list(engines))]
            what = chance.choice(["die", "hang", "stall", "spoil", "refuse", "obey"])
            if what == "die":
                engine.die()
            elif what == "spoil":
                engine.spoil = lambda completion: nonsense(completion, steps=((99, 4),))
            else:
                engine.hangs, engine.control_hangs = what == "hang", what == "stall"
                engine.refuses = "weights" if what == "refuse" else ""

    async def test(controller: RolloutController, engines: dict[str, Any]) -> None:
        published = {0}
        breaking = asyncio.create_task(trouble(engines))
        asking = []
        for step in range(1, 30):
            asking += [
                asyncio.create_task(controller.generate(request(f"{step}/{i}", on_pause=chance.choice(ON_PAUSE))))
                for i in range(10)
            ]
            await asyncio.sleep(chance.uniform(0, 5))
            if chance.random() < 0.3:
                await controller.pause_generation()
                await asyncio.sleep(1)
                await controller.continue_generation()
            published.add(step)
            try:
                await controller.load_weights(chance.choice([Kept(), Live()]), step)
            except (WeightSyncError, EngineUnavailable):
                assert await controller.model_step() != step
                published.discard(step)
        breaking.cancel()
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(outcome, PenstockError):
                assert isinstance(outcome, InfrastructureFailure | EngineUnavailable)
            else:
                assert isinstance(outcome, Completion), outcome
                assert {step for step, _ in outcome.steps} <= published
        assert (await controller.stats()).waiting == 0

    play(test, seed=seed, names="abc", max_requests_per_engine=8, request_timeout_s=20.0, control_timeout_s=5.0)
