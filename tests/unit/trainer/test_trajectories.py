from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import StorageError
from penstock.rollout import (
    NO_TOKENS,
    FinishReason,
    Group,
    Segment,
    Status,
    Turn,
    Verdict,
    new_rollout,
    pack_ids,
)
from penstock.testing import CharTokenizer
from penstock.trainer.index import RolloutIndex
from penstock.trainer.trajectories import Trajectories, read_trajectories, step_path

TOKENIZER = CharTokenizer()


def played_group() -> Group:
    """One linear answer with a tool's text in it, and one that branched."""
    group = []
    for number in range(2):
        rollout = new_rollout("2+2", ground_truth={"sum": 4}, data_source="sums")
        prompt = TOKENIZER.encode("2+2=")
        rollout.prompt = type(rollout.prompt)(
            messages=rollout.messages, ids=pack_ids(prompt), ground_truth={"sum": 4}, data_source="sums"
        )
        rollout.task_name, rollout.group_id, rollout.rollout_id = "sums", "sums:0", f"sums:0:{number}"
        rollout.status, rollout.finish_reason = Status.COMPLETED, FinishReason.STOP
        rollout.reward, rollout.response_text = Verdict(1.0, {"right": 1.0, "short": 0.5}), "4"
        first = NO_TOKENS.append([5, 6], [-0.5, -0.25], model_step=3).append([7], trained=False, model_step=3)
        rollout.segments = (Segment(first),)
        rollout.turns = (Turn("generate", 2, FinishReason.STOP, "4"), Turn("tool", 1, text="ok", name="check"))
        group.append(rollout)
    group[1].segments += (Segment(NO_TOKENS.append([8], [-1.5], model_step=4), parent=0, start=2),)
    return group


def test_a_rollout_is_read_back_with_its_turns_and_every_token(tmp_path: Path) -> None:
    path = Trajectories(tmp_path, TOKENIZER).save_step(10, [played_group()], {"sums:0:0": 0.5, "sums:0:1": -0.5})
    assert path == tmp_path / "step-000010.jsonl"
    first, second = read_trajectories(path)
    assert (first.rollout_id, first.task, first.answer, first.advantage) == ("sums:0:0", "sums", "4", 0.5)
    assert first.prompt[0]["content"] == "2+2" and first.rendered_prompt == "2+2="
    assert first.ground_truth == {"sum": 4} and first.reward == Verdict(1.0, {"right": 1.0, "short": 0.5})
    assert [(turn.kind, turn.text, turn.num_tokens, turn.name) for turn in first.turns] == [
        ("generate", "4", 2, ""),
        ("tool", "ok", 1, "check"),
    ]
    [segment] = first.segments
    assert segment.token_ids.tolist() == [5, 6, 7] and segment.token_mask.tolist() == [1, 1, 0]
    assert segment.token_logprobs.tolist() == [-0.5, -0.25, 0.0] and segment.steps == ((3, 3),)
    assert segment.token_trainer_logprobs is None
    assert first.staleness == 6 and first.tokens == 3
    assert (second.segments[1].parent, second.segments[1].start) == (0, 2) and second.tokens == 4


def test_the_text_is_readable_in_the_file_itself(tmp_path: Path) -> None:
    path = Trajectories(tmp_path, TOKENIZER).save_step(1, [played_group()], {})
    line = json.loads(path.read_text().splitlines()[0])
    assert line["answer"] == "4" and line["turns"][1]["text"] == "ok" and line["reward"]["parts"]["short"] == 0.5


def test_the_trainers_logprobs_come_beside_the_step_when_it_counts(tmp_path: Path) -> None:
    trajectories = Trajectories(tmp_path, TOKENIZER)
    path = trajectories.save_step(1, [played_group()], {})
    before = path.read_bytes()
    made = {
        "sums:0:0": [np.array([-0.6, -0.3, np.nan], dtype=np.float32)],
        "sums:0:1": [np.array([-0.6, -0.3, np.nan], dtype=np.float32), np.array([-1.0], dtype=np.float32)],
    }
    trajectories.save_logprobs(1, made)
    assert path.read_bytes() == before
    first, second = read_trajectories(path)
    logprobs = first.segments[0].token_trainer_logprobs
    assert logprobs is not None
    np.testing.assert_array_equal(logprobs, made["sums:0:0"][0])
    assert [segment.token_trainer_logprobs is not None for segment in second.segments] == [True, True]


def test_a_step_that_is_played_again_forgets_what_the_trainer_made_of_the_first_try(tmp_path: Path) -> None:
    trajectories = Trajectories(tmp_path, TOKENIZER)
    trajectories.save_step(1, [played_group()], {})
    trajectories.save_logprobs(1, {"sums:0:0": [np.zeros(3, dtype=np.float32)]})
    path = trajectories.save_step(1, [played_group()], {})
    assert all(s.token_trainer_logprobs is None for line in read_trajectories(path) for s in line.segments)


def test_steps_sort_as_they_were_trained_and_evaluations_have_files_of_their_own(tmp_path: Path) -> None:
    trajectories = Trajectories(tmp_path, TOKENIZER)
    for step in (2, 10):
        trajectories.save_step(step, [played_group()], {})
        trajectories.save_evaluation(step, [played_group()])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["eval-000002.jsonl", "eval-000010.jsonl", "step-000002.jsonl", "step-000010.jsonl"]
    assert len(read_trajectories(tmp_path / "eval-000010.jsonl")) == 2


def test_the_index_is_told_of_every_file_of_rollouts(tmp_path: Path) -> None:
    trajectories = Trajectories(tmp_path / "trajectories", TOKENIZER, RolloutIndex(tmp_path))
    trajectories.save_step(3, [played_group()], {})
    trajectories.save_logprobs(3, {"sums:0:0": [np.zeros(3, dtype=np.float32)]})
    trajectories.save_evaluation(3, [played_group()])
    for index in (RolloutIndex(tmp_path), RolloutIndex.rebuild(tmp_path)):
        found = index.find(text="4").rollouts
        assert sorted((rollout.kind, rollout.step, rollout.rollout_id) for rollout in found) == [
            ("eval", 3, "sums:0:0"),
            ("eval", 3, "sums:0:1"),
            ("train", 3, "sums:0:0"),
            ("train", 3, "sums:0:1"),
        ]


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"step-000001\.jsonl"):
        Trajectories(tmp_path / "file", TOKENIZER).save_step(1, [played_group()], {})
    step_path(tmp_path, 1).write_text('{"rollout_id": "sums')
    with pytest.raises(StorageError, match=r"could not be read from .*step-000001\.jsonl"):
        read_trajectories(step_path(tmp_path, 1))
