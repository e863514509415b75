"""Saved answers, judged again: to try a judge without training, and to see where it disagrees with the record."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.config import nearest
from penstock.errors import ConfigError, StorageError
from penstock.judger import JudgerConfig, JudgerSet, RunEngine
from penstock.ports import Judger
from penstock.rollout import (
    FinishReason,
    Group,
    Prompt,
    RolloutState,
    Segment,
    Status,
    Tokens,
    Unjudged,
    Verdict,
)
from penstock.trainer.config import RLTrainerConfig
from penstock.trainer.trajectories import Trajectory, read_trajectories

AT_A_TIME = 8
"""Groups, so that a latency is the judge's and not that of a line before it."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, as it was judged then and now."""

    rollout_id: str
    task: str
    recorded: float | None
    """None: there was no verdict."""
    score: float | None
    reason: str
    """Why there is no verdict now, or what the judge said."""
    seconds: float
    """Of a relative judge, for the whole group."""

    @property
    def disagrees(self) -> bool:
        if self.recorded is None or self.score is None:
            return self.recorded is not self.score
        return not math.isclose(self.recorded, self.score, rel_tol=1e-9, abs_tol=1e-9)


def judge_again(config: RLTrainerConfig, path: Path) -> list[Judged]:
    """Every answer of a trajectories file, by the judger of its task, in the order of the file.

    Builds engines only for a judge that asks them. Raises ConfigError when the file is none, when a task of it has no
    judger in this configuration, or one that cannot be used.
    """
    try:
        lines = read_trajectories(path)
    except StorageError as error:
        raise ConfigError(f"--trajectories: {error}") from error
    if not lines:
        raise ConfigError(f"--trajectories: {path} has no rollouts")
    judgers = _judgers_of(config, path, sorted({line.task for line in lines}))
    groups: dict[str, list[Trajectory]] = {}
    for line in lines:
        groups.setdefault(line.group_id, []).append(line)
    judged = asyncio.run(_judge(config, judgers, [_rollouts(group) for group in groups.values()]))
    order = {line.rollout_id: place for place, line in enumerate(lines)}
    return sorted(judged, key=lambda one: order[one.rollout_id])


def _judgers_of(config: RLTrainerConfig, path: Path, tasks: Sequence[str]) -> dict[str, JudgerConfig]:
    """By task; those of the evaluation for what an evaluation left."""
    trained = {task.task_name: task.judger for task in config.manager.task_list}
    evaluated = {}
    if config.evaluator is not None:
        evaluated = {task.task_name: task.judger for task in config.evaluator.manager_config().task_list}
    of_evaluation = path.name.startswith(("eval-", "answers"))
    known = trained | evaluated if of_evaluation else evaluated | trained
    problems = []
    found: dict[str, JudgerConfig] = {}
    for task in tasks:
        judger = known.get(task)
        if judger is not None:
            judger.check()
            found[task] = judger
        elif task in known:
            problems.append(f"task {task!r} has no judger_config; its loop judges, which cannot be done again")
        else:
            problems.append(
                f"{path} has rollouts of task {task!r}; the configuration has none.{nearest(task, [*known])}"
            )
    if problems:
        raise ConfigError(problems)
    return found


def _rollouts(lines: list[Trajectory]) -> Group:
    return [
        RolloutState(
            prompt=Prompt(
                messages=line.prompt,
                ids=line.prompt_ids,
                ground_truth=line.ground_truth,
                data_source=line.data_source,
                extra_info=line.extra_info,
            ),
            task_name=line.task,
            group_id=line.group_id,
            rollout_id=line.rollout_id,
            segments=tuple(
                Segment(Tokens(s.ids, s.logprobs, s.mask, s.steps), s.parent, s.start) for s in line.segments
            ),
            response_text=line.answer,
            turns=line.turns,
            finish_reason=FinishReason(line.finish_reason) if line.finish_reason is not None else None,
            reward=line.reward,
            status=Status(line.status),
        )
        for line in lines
    ]


async def _judge(config: RLTrainerConfig, configs: dict[str, JudgerConfig], groups: list[Group]) -> list[Judged]:
    async with contextlib.AsyncExitStack() as stack:
        judgers = _build_judgers(config, list(configs.values()), stack)
        places = asyncio.Semaphore(AT_A_TIME)

        async def judge(group: Group) -> list[Judged]:
            async with places:
                return await _judge_group(judgers.get(configs[group[0].task_name]), group)

        return [one for judged in await asyncio.gather(*map(judge, groups)) for one in judged]


def _build_judgers(config: RLTrainerConfig, configs: list[JudgerConfig], stack: contextlib.AsyncExitStack) -> JudgerSet:
    if not any(judger.asks_engine for judger in configs):
        judgers = JudgerSet()
    else:
        from penstock.models import load_tokenizer, resolve_model

        model_dir, run_engine = resolve_model(config.model), RunEngine()
        tokenizer = load_tokenizer(model_dir)
        engine = config.engines.build(
            str(model_dir),
            tokenizer,
            deterministic=config.deterministic,
            threads=config.threads()[1],
        )
        stack.push_async_callback(engine.close)
        run_engine.bind(engine)
        judgers = JudgerSet(ports={"engine": run_engine, "tokenizer": tokenizer})
    stack.push_async_callback(judgers.close)
    return judgers


async def _judge_group(judger: Judger, group: Group) -> list[Judged]:
    loop = asyncio.get_running_loop()
    if judger.relative:
        began = loop.time()
        answers = await judger.judge_group(group)
        seconds = loop.time() - began
        return [_compared(rollout, answer, seconds) for rollout, answer in zip(group, answers, strict=True)]
    found = []
    for rollout in group:
        began = loop.time()
        answer = await judger.judge(rollout)
        found.append(_compared(rollout, answer, loop.time() - began))
    return found


def _compared(rollout: RolloutState, answer: Verdict | Unjudged, seconds: float) -> Judged:
    return Judged(
        rollout_id=rollout.rollout_id,
        task=rollout.task_name,
        recorded=rollout.reward.score if rollout.reward is not None else None,
        score=None if isinstance(answer, Unjudged) else answer.score,
        reason=answer.reason if isinstance(answer, Unjudged) else answer.text or "",
        seconds=seconds,
    )


def judged_table(judged: Sequence[Judged], limit: int) -> Iterator[str]:
    """Lines for people: those that disagree or have no verdict first, then the others, then what it comes to."""
    shown = sorted(judged, key=lambda one: (not one.disagrees, one.score is not None))[:limit]
    width = max((len(one.rollout_id) for one in shown), default=7)
    if shown:
        yield f"  {'rollout':<{width}}  {'recorded':>9}  {'judged':>9}  {'seconds':>8}  reason"
    for one in shown:
        mark = "!" if one.disagrees else " "
        reason = " ".join(one.reason.split())[:80]
        scores = f"{_number(one.recorded):>9}  {_number(one.score):>9}"
        yield f"{mark} {one.rollout_id:<{width}}  {scores}  {one.seconds:>8.3f}  {reason}".rstrip()
    if len(shown) < len(judged):
        yield f"  ... and {len(judged) - len(shown)} more; --limit shows them"
    seconds = sorted(one.seconds for one in judged)
    given = [one.score for one in judged if one.score is not None]
    unjudged = len(judged) - len(given)
    mean = f"{sum(given) / len(given):.4g}" if given else "none"
    disagree = sum(one.disagrees for one in judged)
    yield f"{len(judged)} rollouts: {disagree} disagree, {unjudged} unjudged, mean score {mean}"
    yield f"latency: median {seconds[len(seconds) // 2]:.3f} s, longest {seconds[-1]:.3f} s"


def _number(score: float | None) -> str:
    return "none" if score is None else f"{score:.4g}"
