"""Teachers: checked before anything is trained, asked for every answer, by data source."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock.cli.config_file import load_config
from penstock.data import PromptSet
from penstock.engine import EmbeddedEngineConfig, EnginesConfig
from penstock.errors import ConfigError, DeadlineExceeded, InfrastructureFailure, ModelError, RunError
from penstock.events import Nobody
from penstock.models import load_tokenizer, set_cache_directory
from penstock.ports import Tokenizer
from penstock.rollout import ROOT, Group, Prompt, RolloutState, SampleParams, Segment, Status, Tokens, Verdict, pack_ids
from penstock.testing import CharTokenizer
from penstock.trainer.distillation import DistillationConfig, TeacherConfig, Teachers


class Scorer:
    """Finds token i of a sequence e^-(base + i) likely; remembers what it was asked."""

    def __init__(self, base: float = 1.0) -> None:
        self.base = base
        self.asked: list[list[int]] = []
        self.fails: Exception | None = None
        self.hangs = False
        self.closed = 0

    async def score(self, ids: bytes) -> bytes:
        tokens = np.frombuffer(ids, np.int32)
        self.asked.append(tokens.tolist())
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails is not None:
            raise self.fails
        return (-self.base - np.arange(1, len(tokens), dtype=np.float32)).tobytes()

    async def close(self) -> None:
        self.closed += 1


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


def rollout(name: str, source: str = "", *segments: Segment) -> RolloutState:
    return RolloutState(
        prompt=Prompt(ids=pack_ids([3, 4]), data_source=source),
        group_id="g",
        rollout_id=name,
        segments=segments or (Segment(Tokens().append([5, 6], [-0.5, -0.25], model_step=0)),),
        reward=Verdict(0.0),
        status=Status.COMPLETED,
    )


def teachers(engines: dict[str, Any], timeout_s: float = 5.0) -> Teachers:
    return Teachers(engines, CharTokenizer(), timeout_s=timeout_s)


def test_every_segment_is_scored_after_its_own_context() -> None:
    engine = Scorer()
    branch = Segment(Tokens().append([8, 9], [-1.0, -1.0], model_step=0), 0, 1)
    first = Segment(Tokens().append([5, 6, 7], [-1.0] * 3, model_step=0), ROOT, 2)
    found = asyncio.run(teachers({"": engine}).score([[rollout("a", "", first, branch)]]))
    assert engine.asked == [[3, 4, 5, 6, 7], [3, 4, 5, 8, 9]]
    assert [column.tolist() for column in found["a"]] == [[-3.0, -4.0, -5.0], [-4.0, -5.0]]


def test_a_segment_in_which_nothing_was_said_has_nothing_to_score() -> None:
    engine = Scorer()
    first = Segment(Tokens().append([5, 6], [-1.0] * 2, model_step=0), ROOT, 2)
    found = asyncio.run(teachers({"": engine}).score([[rollout("a", "", first, Segment(Tokens(), 0, 1))]]))
    assert engine.asked == [[3, 4, 5, 6]]
    assert [column.tolist() for column in found["a"]] == [[-3.0, -4.0], []]


def test_each_data_source_has_its_teacher_and_what_has_none_is_left_as_it_is() -> None:
    sums, words = Scorer(1.0), Scorer(10.0)
    groups: list[Group] = [[rollout("s", "sums")], [rollout("w", "words")], [rollout("o", "other")]]
    some = teachers({"sums": sums, "words": words})
    found = asyncio.run(some.score(groups))
    assert [found[name][0].tolist() for name in "swo"] == [[-3.0, -4.0], [-12.0, -13.0], [-0.5, -0.25]]
    everything = asyncio.run(teachers({"sums": sums, "": words}).score(groups))
    assert everything["o"][0].tolist() == [-12.0, -13.0]
    asyncio.run(some.close())
    assert sums.closed == words.closed == 1


def test_a_teacher_that_fails_or_hangs_ends_the_step_with_its_name() -> None:
    engine = Scorer()
    engine.fails = InfrastructureFailure("it is gone")
    with pytest.raises(RunError, match=r"a teacher could not score a \(4 tokens\): it is gone"):
        asyncio.run(teachers({"": engine}).score([[rollout("a"), rollout("b")]]))
    engine.fails, engine.hangs = None, True
    with pytest.raises(DeadlineExceeded, match=r"did not score 1 answers within 0\.05 s"):
        asyncio.run(teachers({"": engine}, timeout_s=0.05).score([[rollout("a")]]))


class Nonsense(Scorer):
    def __init__(self, scores: float | None) -> None:
        super().__init__()
        self._scores = scores

    async def score(self, ids: bytes) -> bytes:
        if self._scores is None:
            return b""
        return np.full(len(ids) // 4 - 1, self._scores, np.float32).tobytes()


@pytest.mark.parametrize(("scores", "problem"), [(None, "no logprobs"), (0.5, "no logprobs"), (-2.0, "equally likely")])
def test_a_teacher_that_does_not_score_is_refused_at_the_start(scores: float | None, problem: str) -> None:
    with pytest.raises(RunError, match=problem):
        asyncio.run(teachers({"": Nonsense(scores)}).check())
    asyncio.run(teachers({"": Scorer()}).check())


@pytest.fixture
def tiny_dir(model_cache: Path, make_known: Callable[[str], Path]) -> Any:
    set_cache_directory(model_cache)
    yield make_known("tiny")
    set_cache_directory(None)


@pytest.mark.parametrize(
    ("how", "problem"), [("size", "the student"), ("words", "other tokens"), ("tokens", "token 0 is")]
)
def test_a_teacher_of_another_vocabulary_is_refused(tiny_dir: Path, how: str, problem: str) -> None:
    class Student:
        """The tokenizer of the model, changed."""

        def __init__(self, inner: Tokenizer) -> None:
            self._inner = inner
            self.stop_ids = inner.stop_ids
            self.vocab_size = inner.vocab_size + (how == "size")

        def encode(self, text: str) -> list[int]:
            return self._inner.encode(text)[:: -1 if how == "words" else 1]

        def decode(self, ids: Any) -> str:
            return "?" if how == "tokens" else self._inner.decode(ids)

        def render(self, messages: Any, tools: Any = ()) -> list[int]:
            return self._inner.render(messages, tools)

    config = DistillationConfig(teachers=TeacherConfig(model="tiny"))
    with pytest.raises(ModelError, match=problem):
        config.build(Student(load_tokenizer(tiny_dir)), deterministic=False, threads=1, observer=Nobody())


class CountedEngines(EnginesConfig):
    built: ClassVar[list[str]] = []

    def build(self, model_dir: str, *arguments: Any, **options: Any) -> Any:
        self.built.append(model_dir)


def test_no_teacher_is_started_when_one_of_them_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    engines = CountedEngines()
    first = TeacherConfig(model="tiny", engines=engines)
    other = TeacherConfig(model=str(tmp_path), engines=engines, data_sources=["words"])
    with pytest.raises(ModelError, match=str(tmp_path)):
        DistillationConfig(teachers=[first, other]).build(
            load_tokenizer(tiny_dir), deterministic=False, threads=1, observer=Nobody()
        )
    assert CountedEngines.built == []


def test_a_teacher_without_room_for_the_answers_is_refused_before_anything_is_loaded(
    tiny_dir: Path, tmp_path: Path
) -> None:
    teacher = ["distillation.teachers.model=tiny", "distillation.teachers.engines.engine.max_context=14"]
    config = load_config("distill-tiny", [*teacher, "evaluator=null"])
    problem = (
        r"teacher 'tiny' has a context of 14 tokens, the student of 128: a prompt has 7, and with max_tokens 8 "
        "its answer could not be scored"
    )
    with pytest.raises(ModelError, match=problem):
        config.build(run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_short_context_is_no_matter_where_the_answers_fit_or_another_teacher_scores_them(tiny_dir: Path) -> None:
    def prompts(length: int, source: str) -> PromptSet:
        return PromptSet([Prompt(ids=pack_ids([3] * length), data_source=source)])

    short = EnginesConfig(engine=EmbeddedEngineConfig(max_context=20))
    words = TeacherConfig(model="tiny", engines=short, data_sources=["words"])
    config = DistillationConfig(teachers=[words, TeacherConfig(model="tiny")])
    config.require_room([(prompts(12, "words"), 8), (prompts(100, "sums"), 8)], 128)
    with pytest.raises(ModelError, match="a prompt has 12, and with max_tokens 9"):
        config.require_room([(prompts(12, "words"), 9)], 128)
    config.require_room([(prompts(12, "words"), 9)], 20)  # the student has no more room itself


def test_a_teacher_whom_nobody_needs_is_refused() -> None:
    prompts = PromptSet([Prompt(data_source="sums")])
    teachers({"sums": Scorer(), "": Scorer()}).require_pupils([prompts])
    with pytest.raises(ModelError, match=r"data source 'words'; the prompts have \['sums'\]"):
        teachers({"words": Scorer()}).require_pupils([prompts])


@pytest.mark.parametrize(
    ("sources", "problem"),
    [([], "there is no teacher"), ([[], []], "several teachers have no data_sources"), ([["a"], ["a"]], "2 teachers")],
)
def test_teachers_that_cannot_share_the_work_are_refused(sources: list[list[str]], problem: str) -> None:
    config = DistillationConfig(teachers=[TeacherConfig(model="tiny", data_sources=s) for s in sources])
    with pytest.raises(ConfigError, match=problem):
        config.check()


def test_distillation_is_refused_at_another_temperature() -> None:
    config = load_config("distill-tiny", [])
    config.check()
    params = SampleParams(temperature=0.7, max_tokens=8)
    with pytest.raises(ConfigError, match="distillation needs 1"):
        config.replace("manager.tasks.0.agent_loop_config.sample_params", params).check()


def test_a_student_has_nothing_to_learn_from_itself(tiny_dir: Path, tmp_path: Path) -> None:
    """From the configuration to the gradient: both find every token equally likely, and so there is no advantage."""
    config = load_config("distill-tiny", ["total_steps=1", "evaluator=null", "train_batch_size=4", "cpu_threads=1"])
    config = config.replace("distillation.teachers.model", "tiny")
    config.build(run_dir=tmp_path / "run").fit()
    [line] = metrics_of(tmp_path / "run")
    assert abs(line["distill/reverse_kl"]) < 1e-5
    assert line["train/grad_norm"] < 1e-4
    assert line["reward/std"] > 0
