"""Tasksets of a real verifiers, from `make setup-verifiers`, played against the session endpoint and trained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import tokenizer_of
from session_clients import Spoken

from penstock.agent_loop.verifiers_loop import VerifiersAgentLoop, VerifiersAgentLoopConfig
from penstock.data import VerifiersTasksetConfig
from penstock.errors import DatasetError
from penstock.rollout import FinishReason, Group, RolloutState, SampleParams, Status
from penstock.testing import check_ledger

HERE = Path(__file__).parent
TOKENIZER = tokenizer_of("qwen2.5")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'

DOCUMENT = Path(__file__).parents[2] / "docs" / "sessions.md"


def taskset(*prompts: str, **options: Any) -> VerifiersTasksetConfig:
    arguments = {"prompts": list(prompts), "num_tasks": 0}
    return VerifiersTasksetConfig(taskset="sums_taskset", taskset_arguments=arguments, directory=str(HERE), **options)


def rollouts_of(tasks: VerifiersTasksetConfig) -> Group:
    prompts = tasks.load(TOKENIZER, context=None, max_tokens=64, data_sources=None).prompts
    return [
        RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id=f"t:0:{number}")
        for number, prompt in enumerate(prompts)
    ]


def loop_of(tasks: VerifiersTasksetConfig, *texts: str, **options: Any) -> tuple[VerifiersAgentLoop, Spoken]:
    engine = Spoken(TOKENIZER, texts, end="<|im_end|>")
    config = VerifiersAgentLoopConfig(taskset=tasks, sample_params=SampleParams(max_tokens=100), **options)
    config.check()
    loop = config.build(engine=engine, tokenizer=TOKENIZER, judger=None)
    assert isinstance(loop, VerifiersAgentLoop)
    return loop, engine


def play(loop: VerifiersAgentLoop, *groups: Group, after: Callable[[], Any] | None = None) -> None:
    async def main() -> None:
        try:
            for group in groups:
                await loop.generate_group(group, enable_partial_rollout=True)
                if after is not None:
                    after()
        finally:
            await loop.close()

    asyncio.run(main())


def test_the_run_in_the_documentation_learns(tmp_path: Path, model_cache: Path) -> None:
    part = DOCUMENT.read_text().partition("## A taskset of verifiers\n")[2]
    (tmp_path / "run_of_verifiers.py").write_text(part.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "tasksets").symlink_to(HERE)
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "train", "run_of_verifiers.py", "--run-dir", "run"],
        cwd=tmp_path,
        env=os.environ | {"PENSTOCK_HOME": str(model_cache.parent)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert np.mean(found[-3:]) - np.mean(found[:1]) >= 0.3, found
    assert lines[0]["train/mismatch/max_abs"] < 1e-3  # recorded ids are what the model saw
    check_ledger(tmp_path / "run").require_none()


def test_the_reward_of_the_task_is_the_verdict_and_every_turn_is_on_record() -> None:
    tasks = taskset("2+2=?")
    (rollout,) = rollouts_of(tasks)
    loop, engine = loop_of(tasks, CALL, "4")
    play(loop, [rollout])
    assert rollout.status is Status.COMPLETED, rollout.error
    assert rollout.reward is not None
    assert rollout.reward.score == 1.0
    assert rollout.reward.parts == {"correct": 0.5, "turns": 2.0}
    assert rollout.response_text == "4"
    assert [turn.text for turn in rollout.turns if turn.kind == "generate"] == [CALL, "4"]
    assert len(rollout.segments) == 1
    assert len(engine.asked) == 2


def test_the_chat_that_comes_with_verifiers_speaks_to_the_endpoint() -> None:
    tasks = taskset("2+2=?")
    (rollout,) = rollouts_of(tasks)
    loop, _ = loop_of(tasks, "4", harness="null")
    play(loop, [rollout])
    assert rollout.status is Status.COMPLETED, rollout.error
    assert rollout.reward is not None and rollout.reward.score == 1.0


def test_an_agent_at_its_turn_limit_is_scored_by_what_it_has() -> None:
    tasks = taskset("2+2=?")
    (rollout,) = rollouts_of(tasks)
    loop, _ = loop_of(tasks, CALL, CALL, "4", max_turns=1)
    play(loop, [rollout])
    assert rollout.status is Status.COMPLETED, rollout.error
    assert rollout.reward is not None and rollout.reward.score == 0.0
    assert rollout.finish_reason is FinishReason.STOP


def test_a_task_that_cannot_be_scored_has_no_reward() -> None:
    tasks = taskset("unscored", "2+2=?")
    unscored, scored = rollouts_of(tasks)
    loop, _ = loop_of(tasks, "4", "4")
    play(loop, [unscored, scored])
    assert unscored.status is Status.FAILED and unscored.reward is None
    assert unscored.error is not None and "there is no answer to this" in unscored.error.message
    assert scored.status is Status.COMPLETED


def test_an_agent_that_hangs_costs_its_deadline_and_is_ended() -> None:
    tasks = taskset("hang", "2+2=?")
    hangs, other = rollouts_of(tasks)
    loop, _ = loop_of(tasks, "4", rollout_timeout_s=30.0)
    play(loop, [hangs, other])
    assert hangs.status is Status.FAILED
    assert hangs.error is not None and "was not played within 30 s" in hangs.error.message
    assert other.status is Status.COMPLETED
    assert not descendants(" hang")


def test_a_process_that_dies_fails_what_it_played_and_the_next_rollout_starts_another() -> None:
    tasks = taskset("hang", "2+2=?")
    hangs, other = rollouts_of(tasks)
    loop, _ = loop_of(tasks, "4")

    ended: list[int] = []

    def kill_the_player_of(program: str) -> None:
        deadline = time.monotonic() + 60
        while not (played := descendants(program)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (player,) = descendants("verifiers_program.py")
        os.kill(player, signal.SIGKILL)
        ended.extend(played)

    async def main() -> None:
        try:
            playing = asyncio.create_task(loop.generate_group([hangs], enable_partial_rollout=True))
            await asyncio.to_thread(kill_the_player_of, " hang")
            await playing
            await loop.generate_group([other], enable_partial_rollout=True)
        finally:
            await loop.close()

    asyncio.run(main())
    for pid in ended:
        os.kill(pid, signal.SIGKILL)  # verifiers starts programs in sessions of their own; nobody was left to end it
    assert hangs.error is not None and "verifiers was killed by SIGKILL" in hangs.error.message
    assert other.status is Status.COMPLETED, other.error


def test_a_taskset_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(DatasetError, match=r"taskset 'no_such' cannot be used: ModuleNotFoundError: .*not found"):
        VerifiersTasksetConfig(taskset="no_such", directory=str(HERE)).load(
            TOKENIZER, context=None, max_tokens=64, data_sources=None
        )


def test_a_row_of_another_taskset_is_no_task() -> None:
    (stranger,) = rollouts_of(taskset("3+1=?"))
    loop, _ = loop_of(taskset("2+2=?"), "4")
    play(loop, [stranger])
    assert stranger.error is not None and "rows must come from the loop's own taskset" in stranger.error.message


def test_a_slice_of_a_taskset_is_taken() -> None:
    tasks = taskset("a", "b", "c", "d", first=1, size=2)
    assert [rollout.messages[-1]["content"] for rollout in rollouts_of(tasks)] == ["b", "c"]


def descendants(wanted: str) -> list[int]:
    """Processes below this one whose command line has these words."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")

    def is_ours(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return [pid for pid, command in commands.items() if wanted in command and is_ours(pid)]
