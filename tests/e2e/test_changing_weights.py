"""Weights that change in the middle of a request of an agent with the real `openai` package."""

from __future__ import annotations

import numpy as np

from penstock.cli.config_file import load_config
from penstock.models import load_tokenizer
from penstock.models.tiny_chat import make_tiny_chat
from penstock.rollout import unpack_ids
from penstock.testing import check_ledger
from penstock.trainer.trajectories import read_trajectories

RUN = '''
import asyncio
import contextlib
import json
import threading
from pathlib import Path

import openai

from penstock import (
    AdditionConfig, AsyncProduceStrategyConfig, EmbeddedEngineConfig, EndpointAgentLoopConfig, EnginesConfig,
    JsonlTrackerConfig, RLDisaggregatedTrainerConfig, SampleParams, SamplerConfig, TaskSpecConfig, TrainWorkerConfig,
)

HERE = Path(__file__).parent
K = 8


def note(file, **what):
    with (HERE / file).open("a") as notes:
        notes.write(json.dumps(what) + "\\n")


asked = 0


async def agent(prompt, base_url, api_key):
    global asked
    asked += 1
    streamed, text = asked % 2 == 1, ""
    options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        messages = [{"role": "user", "content": prompt}]
        answer = await client.chat.completions.create(model="m", messages=messages, **options)
        if streamed:
            async for chunk in answer:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                name, usage = chunk.id, chunk.usage
        else:
            text, name, usage = answer.choices[0].message.content, answer.id, answer.usage
    note("clients.jsonl", name=name, streamed=streamed, text=text, tokens=usage.completion_tokens)
    return {"answer": name, "reward": float(streamed)}


class HeldEngineConfig(EmbeddedEngineConfig):
    def build(self, *arguments, **options):
        return Held(super().build(*arguments, **options))


class Held:
    """Lets the first group go when the second one is in the middle of its answers, and stands still until a pause."""

    def __init__(self, engine):
        self._engine = engine
        self._groups = []
        self._meeting = asyncio.Barrier(2 * K)
        self._loop = None
        self._steps = 0
        self._in_the_middle = asyncio.Event()
        self._told_to_pause = threading.Event()
        engine.watch(self._stand_still)

    async def generate(self, request):
        await self._begin(request)
        completion = await self._engine.generate(request)
        await self._end(request, [completion])
        return completion

    async def stream(self, request):
        await self._begin(request)
        made = []
        async with contextlib.aclosing(self._engine.stream(request)) as pieces:
            async for piece in pieces:
                made.append(piece)
                if piece.finish_reason is not None:
                    await self._end(request, made)
                yield piece

    async def pause_generation(self):
        self._told_to_pause.set()
        await self._engine.pause_generation()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def _begin(self, request):
        if request.group_id not in self._groups:
            self._groups.append(request.group_id)
        place = self._groups.index(request.group_id)
        if place == 1:
            await self._meeting.wait()
            self._loop = asyncio.get_running_loop()
        elif place > 1:
            await asyncio.Event().wait()  # no step of this run needs it

    async def _end(self, request, pieces):
        note("engine.jsonl", ids=b"".join(piece.ids for piece in pieces).hex())
        if request.group_id == self._groups[0]:
            await self._meeting.wait()
            await self._in_the_middle.wait()

    def _stand_still(self, stage, began, ended):
        """In the engine's thread."""
        if self._loop is None or stage != "decode":
            return
        self._steps += 1
        if self._steps == 3:
            self._loop.call_soon_threadsafe(self._in_the_middle.set)
            assert self._told_to_pause.wait(120)


trainer = RLDisaggregatedTrainerConfig(
    model=str(HERE / "model"),
    engines=EnginesConfig(engine=HeldEngineConfig(max_running=2 * K)),
    train=TrainWorkerConfig(lr=1e-3),
    tasks=TaskSpecConfig(
        task_name="sums",
        sampler_config=SamplerConfig(dataset=AdditionConfig(template="{a}+{b}=?"), prompt_repeat_k=K),
        agent_loop_config=EndpointAgentLoopConfig(agent=agent, sample_params=SampleParams(max_tokens=40)),
        produce_strategy_config=AsyncProduceStrategyConfig(
            over_sample_threshold=1.0, enable_partial_rollout=True, max_staleness=1
        ),
    ),
    trackers=[JsonlTrackerConfig()],
    total_steps=2,
    train_batch_size=1,
    seed=0,
)
'''


def test_a_request_under_which_the_weights_change_is_one_answer_to_the_client_and_is_trained(tmp_path, read_lines):
    (tmp_path / "model").mkdir()
    make_tiny_chat(tmp_path / "model", lessons=2)
    (tmp_path / "held_run.py").write_text(RUN)
    run_dir = tmp_path / "run"
    load_config(str(tmp_path / "held_run.py")).build(run_dir=run_dir).fit()

    rollouts = read_trajectories(run_dir / "trajectories" / "step-000002.jsonl")
    clients = {line["name"]: line for line in read_lines(tmp_path / "clients.jsonl")}
    made = {line["ids"] for line in read_lines(tmp_path / "engine.jsonl")}
    tokenizer = load_tokenizer(tmp_path / "model")
    changed = set()
    for rollout in rollouts:
        [turn], [segment] = rollout.turns, rollout.segments
        got = clients[rollout.answer]
        # The record is what the engine made and what the client got, whole, and all of it is trained.
        assert segment.ids.hex() in made
        assert tokenizer.decode(unpack_ids(segment.ids).tolist()) == turn.text == got["text"]
        assert len(segment.token_ids) == turn.num_tokens == got["tokens"]
        assert segment.token_mask.all() and np.isfinite(segment.token_trainer_logprobs).all()
        assert rollout.advantage != 0
        if len(segment.steps) == 2:
            (before, some), (after, others) = segment.steps
            assert (before, after) == (0, 1) and some >= 3 and others >= 1
            assert rollout.staleness == 1
            changed.add(got["streamed"])
    assert changed == {True, False}
    [step] = [line for line in read_lines(run_dir / "metrics.jsonl") if line["step"] == 2]
    assert step["staleness/max"] == 1
    assert step["trained_tokens"] == sum(len(rollout.segments[0].token_ids) for rollout in rollouts)
    check_ledger(run_dir).require_none()
