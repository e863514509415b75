"""On-policy distillation: a teacher says how likely it finds each token that the student sampled.

    advantage of a token += -coef * (log p_student - log q_teacher)

A teacher is an engine of its own, asked to score. It is checked before anything is trained: the same vocabulary as the
student, room for its answers, and logprobs that are logprobs. Several teachers share the work by data source.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pydantic

from penstock.config import Config
from penstock.engine import EnginesConfig, VllmEngineConfig
from penstock.errors import DeadlineExceeded, ModelError, RolloutFailure, RunError
from penstock.ports import Engine, Tokenizer
from penstock.rollout import FloatArray, Group, RolloutState, pack_ids, unpack_ids

if TYPE_CHECKING:
    from penstock.data import PromptSet
    from penstock.events import Observer

COMPARED_TOKENS = 512
"""Of a vocabulary, evenly spread; with the words below, enough to tell two of them apart."""
WORDS = "Teacher and student read 1234 words: naïve, ∑, 学生.\n"


class TeacherConfig(Config):
    """A model that scores, and for whom."""

    model: str
    """As the run's `model` names one."""
    engines: EnginesConfig = EnginesConfig()
    """What it runs in; its weights never change."""
    data_sources: list[str] = []
    """Whose prompts it scores; none: all that no other teacher scores."""


class DistillationConfig(Config):
    """Teachers, and how much they count."""

    teachers: TeacherConfig | list[TeacherConfig]
    """One, or several that share the work by data source."""
    coef: float = pydantic.Field(default=1.0, gt=0, le=1e3)
    """What log p - log q of a token takes from its advantage."""
    timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """For the teachers to score the answers of one train step."""

    @property
    def teacher_list(self) -> list[TeacherConfig]:
        return [self.teachers] if isinstance(self.teachers, TeacherConfig) else self.teachers

    def problems(self) -> Iterator[str]:
        teachers = self.teacher_list
        if not teachers:
            yield "there is no teacher; it needs at least 1"
        if sum(not teacher.data_sources for teacher in teachers) > 1:
            yield "several teachers have no data_sources; at most one can score everything that is left"
        named = [source for teacher in teachers for source in teacher.data_sources]
        for source in sorted({source for source in named if named.count(source) > 1}):
            yield f"data source {source!r} has {named.count(source)} teachers; it can have one"

    def require_room(self, prompts: Iterable[tuple[PromptSet, int]], context: int) -> None:
        """For each prompt with an answer of its task's `max_tokens` in the context of its teacher; the student's own is
        `context`. Raises ModelError with the first that does not fit.
        """
        limits = {
            source: (limit, teacher.model)
            for teacher in self.teacher_list
            if (limit := _context_of(teacher)) < context
            for source in teacher.data_sources or [_ALL]
        }
        if not limits:  # whatever fits the student fits them
            return
        named = {source for teacher in self.teacher_list for source in teacher.data_sources}
        for prompt_set, max_tokens in prompts:
            for prompt in prompt_set.prompts:
                limit, name = limits.get(prompt.data_source if prompt.data_source in named else _ALL, (context, ""))
                if (length := len(prompt.ids) // 4) + max_tokens > limit and name:
                    raise ModelError(
                        f"teacher {name!r} has a context of {limit} tokens, the student of {context}: a prompt has "
                        f"{length}, and with max_tokens {max_tokens} its answer could not be scored"
                    )

    def build(self, student: Tokenizer, *, deterministic: bool, threads: int | None, observer: Observer) -> Teachers:
        """Start the teachers' engines. Raises ModelError when one has another vocabulary."""
        from penstock.models import load_tokenizer, resolve_model

        found = []
        for teacher in self.teacher_list:
            directory = resolve_model(teacher.model)
            tokenizer = load_tokenizer(directory)
            _check_vocabulary(teacher.model, tokenizer, student)
            found.append((teacher, directory, tokenizer))
        # Only now: the engine of one must not be left behind when the next is refused.
        engines: dict[str, Engine] = {}
        for teacher, directory, tokenizer in found:
            engine = teacher.engines.build(
                str(directory), tokenizer, deterministic=deterministic, threads=threads, observer=observer
            )
            engines |= dict.fromkeys(teacher.data_sources or [_ALL], engine)
        return Teachers(engines, student, timeout_s=self.timeout_s)


_ALL = ""


def _context_of(teacher: TeacherConfig) -> int:
    """The longest sequence that it scores."""
    from penstock.models import model_context, resolve_model

    engine = teacher.engines.engine
    limit = min(model_context(resolve_model(teacher.model)), getattr(engine, "max_context", None) or sys.maxsize)
    return limit - isinstance(engine, VllmEngineConfig)  # which always makes one more


class Teachers:
    """By data source; whoever has them closes them."""

    def __init__(self, engines: Mapping[str, Engine], tokenizer: Tokenizer, *, timeout_s: float) -> None:
        self._engines = engines
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s

    def require_pupils(self, prompts: Iterable[PromptSet]) -> None:
        """Raises ModelError for a teacher of a data source that no prompt has."""
        found = {prompt.data_source for prompt_set in prompts for prompt in prompt_set.unrendered}
        for source in self._engines.keys() - found - {_ALL}:
            raise ModelError(f"a teacher is to score data source {source!r}; the prompts have {sorted(found)}")

    async def check(self) -> None:
        """Ask each for logprobs of a few tokens. Raises RunError for one that does not give them."""
        ids = self._tokenizer.encode(WORDS)[:32]
        for engine in self._each():
            scores = await self._asked(engine, ids)
            if len(scores) != len(ids) - 1 or not np.isfinite(scores).all() or (scores > 1e-3).any():
                raise RunError(f"a teacher scores {len(ids)} tokens with {scores[:4]}...; those are no logprobs")
            if len(scores) > 2 and np.ptp(scores) == 0:
                raise RunError(f"a teacher finds every token equally likely ({scores[0]}); it does not score")

    async def score(self, groups: Sequence[Group]) -> dict[str, list[FloatArray]]:
        """The teachers' logprob of every token, by rollout and segment. What no teacher scores has the student's own.

        Raises RunError when a teacher fails, DeadlineExceeded when it takes too long.
        """
        rollouts = [rollout for group in groups for rollout in group]
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._of_all(rollouts)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the teachers did not score {len(rollouts)} answers within {self._timeout_s:g} s "
                "(distillation.timeout_s)"
            ) from None

    async def _of_all(self, rollouts: Sequence[RolloutState]) -> dict[str, list[FloatArray]]:
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = {r.rollout_id: tasks.create_task(self._of_rollout(r), name=r.rollout_id) for r in rollouts}
        except ExceptionGroup as failures:
            # One teacher that fails fails for many; the first says it.
            raise failures.exceptions[0] from None
        return {rollout_id: task.result() for rollout_id, task in asked.items()}

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for engine in self._each():
                stack.push_async_callback(engine.close)

    def _each(self) -> list[Engine]:
        return list({id(engine): engine for engine in self._engines.values()}.values())

    async def _of_rollout(self, rollout: RolloutState) -> list[FloatArray]:
        engine = self._engines.get(rollout.data_source) or self._engines.get(_ALL)
        if engine is None:
            return [np.frombuffer(segment.tokens.logprobs, dtype=np.float32) for segment in rollout.segments]
        found = []
        for index, segment in enumerate(rollout.segments):
            if not len(segment.tokens):  # begun, and nothing was said
                found.append(np.empty(0, dtype=np.float32))
                continue
            context = unpack_ids(rollout.context_ids(index))
            ids = np.concatenate([context, unpack_ids(segment.tokens.ids)])
            scores = await self._asked(engine, ids.tolist(), rollout.rollout_id)
            column = np.full(len(segment.tokens), np.nan, dtype=np.float32)
            # A token that nothing comes before has no logprob; it is never trained.
            column[len(segment.tokens) - min(len(scores), len(column)) :] = scores[-len(column) :]
            found.append(column)
        return found

    async def _asked(self, engine: Engine, ids: list[int], who: str = "a probe") -> FloatArray:
        try:
            return np.frombuffer(await engine.score(pack_ids(ids)), dtype=np.float32)
        except RolloutFailure as failure:
            raise RunError(f"a teacher could not score {who} ({len(ids)} tokens): {failure}") from failure


def _check_vocabulary(name: str, teacher: Tokenizer, student: Tokenizer) -> None:
    problem = ""
    if teacher.vocab_size != student.vocab_size:
        problem = f"it has {teacher.vocab_size} tokens, the student {student.vocab_size}"
    elif teacher.encode(WORDS) != student.encode(WORDS):
        problem = f"it reads {WORDS!r} as other tokens"
    else:
        places = range(0, student.vocab_size, max(1, student.vocab_size // COMPARED_TOKENS))
        other = next((i for i in places if teacher.decode([i]) != student.decode([i])), None)
        if other is not None:
            problem = f"token {other} is {teacher.decode([other])!r}, the student's is {student.decode([other])!r}"
    if problem:
        raise ModelError(f"teacher {name!r} cannot score the student's tokens: {problem}; both need one vocabulary")
