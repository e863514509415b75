"""vLLM in a Ray actor that runs in the other environment: answers, weights, and a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import CharacterTokenizer, Tensors, ask, has_requests, ids_of
from transformers import AutoModelForCausalLM
from vllm_run import vllm_run

from penstock.cluster.engines import RayEngines
from penstock.cluster.session import Session, connect
from penstock.cluster.site import RaySite
from penstock.engine import EnginesConfig, RolloutControllerConfig, VllmEngineConfig
from penstock.events import ActorLost, ActorRecovered, EngineChanged, Event
from penstock.resources import RunResourcesConfig, WorkerResourcesConfig
from penstock.testing.ledger_history import check_ledger

DEADLINE = 240.0
GiB = 1 << 30


class Told:
    def __init__(self) -> None:
        self.story: list[str] = []
        self.changed = asyncio.Event()

    def notice(self, event: Event) -> None:
        match event:
            case EngineChanged():
                self.story.append(f"{event.engine} {event.state}")
            case ActorLost():
                self.story.append(f"{event.actor} lost")
            case ActorRecovered():
                self.story.append(f"{event.actor} recovered")
        self.changed.set()

    async def until(self, word: str) -> None:
        while word not in self.story:
            self.changed.clear()
            await self.changed.wait()


class Asked:
    """What a site is asked for by a trainer, as far as engines are concerned."""

    def __init__(self, model_dir: Path, **fields: Any) -> None:
        engine = VllmEngineConfig(dtype="float32", max_running=6, max_context=2048, kv_cache_gb=0.1, **fields)
        limits = RolloutControllerConfig(start_timeout_s=DEADLINE, unavailable_timeout_s=DEADLINE)
        self.engines = EnginesConfig(engine=engine, controller=limits)
        self.resources = RunResourcesConfig(engines=WorkerResourcesConfig(cpu_memory_per_worker=2 * GiB))
        self.deterministic = False
        self.cpu_threads = 1
        self.model_dir = model_dir
        self.tokenizer = CharacterTokenizer()
        self.config = self
        self.run_dir = None


def libraries_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def session() -> Iterator[Session]:
    with connect("local", num_cpus=4) as session:
        yield session


def test_vllm_in_an_actor_answers_takes_weights_and_comes_back_with_them_after_a_kill(
    session: Session, model_dir: Path
) -> None:
    told = Told()
    engines: Any = RaySite(session, observer=told).build_engines(Asked(model_dir))  # type: ignore[arg-type]
    assert isinstance(engines, RayEngines)
    state = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    generator = torch.Generator().manual_seed(9)
    other = {name: weight + 0.2 * torch.randn(weight.shape, generator=generator) for name, weight in state.items()}

    async def greedy(count: int, max_tokens: int = 12) -> list[list[int]]:
        asked = (engines.generate(ask(f"{i}", [5, i], temperature=0.0, max_tokens=max_tokens)) for i in range(count))
        return [ids_of(answer) for answer in await asyncio.gather(*asked)]

    async def main() -> None:
        try:
            async with asyncio.timeout(2 * DEADLINE):
                before = await greedy(4)
                (address,) = engines.addresses
                identity = await address.member.identify()
                assert "/.venv-vllm/" in libraries_of(identity.pid)
                await engines.load_weights(Tensors(other), 4)
                after = await greedy(4)
                assert after != before
                assert (await engines.generate(ask("step"))).steps == ((4, 12),)
                asking = asyncio.create_task(greedy(4, 400))
                await has_requests(engines, 4)
                told.story.clear()
                os.kill(identity.pid, signal.SIGKILL)
                long = await asking
                assert [answer[:12] for answer in long] == after, "made by the same weights, in another process"
                assert (await engines.generate(ask("step"))).steps == ((4, 12),)
        finally:
            await engines.close()

    asyncio.run(main())
    words = [word for word in told.story if word != "engine-0 fenced"]
    assert sorted(words) == sorted(["engine-0 lost", "engine-0 recovering", "engine-0 recovered", "engine-0 active"])


def test_a_short_run_on_ray_learns_with_vllm(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(vllm_run(model_dir))
    settings = ["resources.engines.num_cpus_per_worker=0.5", f"resources.engines.cpu_memory_per_worker={2 * GiB}"]
    command = ["train", "short.py", "--run-dir", "run", "--address", "local", *(f"--set={each}" for each in settings)]
    train = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *command],
        cwd=tmp_path,
        env=os.environ | {"PENSTOCK_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert train.returncode == 0, train.stdout + train.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 8
    rewards = [line["reward/mean"] for line in steps]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1, rewards
    check_ledger(tmp_path / "run").require_none()
