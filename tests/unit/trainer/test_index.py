from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import RefusedError, StorageError
from penstock.events import Event, Warned
from penstock.rollout import Group, Prompt, RolloutState, Tokens, Verdict
from penstock.testing import CharTokenizer
from penstock.trainer.index import INDEX_FILE, RolloutIndex, _match, _question
from penstock.trainer.trajectories import Trajectories


def line(number: int, **said: Any) -> dict[str, Any]:
    return {
        "rollout_id": f"sums:{number}:0",
        "group_id": f"sums:{number}",
        "task": "sums",
        "data_source": "made",
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "answer": f"It is {number + 1}.",
        "reward": {"score": number / 10},
        "tokens": 7,
        "model_steps": [[3, 4], [4, 3]],
        **said,
    }


def write(run_dir: Path, name: str, *lines: dict[str, Any]) -> Path:
    path = run_dir / "trajectories" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


@pytest.fixture
def index(tmp_path: Path) -> RolloutIndex:
    """Steps 1 and 2 of two tasks, and an evaluation."""
    made = RolloutIndex(tmp_path)
    code = {"task": "code", "data_source": "repositories", "status": "completed"}
    made.add(write(tmp_path, "step-1", line(0), line(1), line(2, **code, answer="prime numbers are fun")))
    made.add(write(tmp_path, "step-2", line(3), line(4, **code, prompt="sort the prime numbers")))
    made.add(write(tmp_path, "eval-2", line(5, reward=None), line(6)))
    return made


def numbers(rollouts: Any) -> list[int]:
    return [int(found.group_id.partition(":")[2]) for found in rollouts]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, [6, 5, 4, 3, 2, 1, 0]),
        ({"kind": "train"}, [4, 3, 2, 1, 0]),
        ({"kind": "eval", "step": 2}, [6, 5]),
        ({"step": 1}, [2, 1, 0]),
        ({"task": "code"}, [4, 2]),
        ({"task": "code", "step": 2, "kind": "train"}, [4]),
        ({"status": "completed"}, [4, 2]),
        ({"data_source": "repositories", "step": 1}, [2]),
        ({"group_id": "sums:3"}, [3]),
        ({"rollout_id": "sums:3:0"}, [3]),
        ({"min_reward": 0.2}, [6, 4, 3, 2]),
        ({"min_reward": 0.2, "max_reward": 0.4, "task": "sums"}, [3]),
        ({"text": "prime"}, [4, 2]),
        ({"text": "PRIME numbers fun"}, [2]),
        ({"text": "prime", "min_reward": 0.3}, [4]),
        ({"text": "3 + 1"}, [3]),
        ({"text": 'said "OR" NOT (near'}, []),
        ({"text": "prime", "task": "sums"}, []),
        ({"text": "+ ?"}, [6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_rollouts_are_found_page_by_page(index: RolloutIndex, asked: dict[str, Any], found: list[int]) -> None:
    assert numbers(index.find(**asked).rollouts) == found
    paged: list[int] = []
    after = None
    while True:
        page = index.find(**asked, limit=2, after=after)
        paged += numbers(page.rollouts)
        if page.next is None:
            break
        after = page.next
    assert paged == found


def test_what_is_found_says_where_its_line_is(index: RolloutIndex) -> None:
    (found,) = index.find(task="code", step=1).rollouts
    assert (found.kind, found.step, found.file, found.reward, found.num_tokens) == ("train", 1, "step-1.jsonl", 0.2, 7)
    assert (found.oldest, found.newest, found.status) == (3, 4, "completed")
    assert index.read(found)["answer"] == "prime numbers are fun"


def test_a_step_that_is_written_again_takes_the_place_of_its_first_try(tmp_path: Path, index: RolloutIndex) -> None:
    (old,) = index.find(text="fun").rollouts
    index.add(write(tmp_path, "step-1", line(7, answer="another try")))
    assert numbers(index.find(step=1).rollouts) == [7]
    assert not index.find(text="fun").rollouts
    assert numbers(index.find(text="another").rollouts) == [7]
    with pytest.raises(StorageError, match="was changed since it was indexed"):
        index.read(old)


def test_rebuilding_finds_the_same_as_adding_did(tmp_path: Path, index: RolloutIndex) -> None:
    before = index.find().rollouts
    (tmp_path / INDEX_FILE).unlink()
    write(tmp_path, "notes", {"rollout_id": "no rollout of a step"})
    again = RolloutIndex.rebuild(tmp_path).find().rollouts
    strip = [(found.rollout_id, found.file, found.offset, found.reward, found.step, found.kind) for found in again]
    assert sorted(strip) == sorted(
        (found.rollout_id, found.file, found.offset, found.reward, found.step, found.kind) for found in before
    )


def test_lines_that_say_little_or_were_cut_off_are_no_obstacle(tmp_path: Path) -> None:
    path = write(tmp_path, "step-1", {"rollout_id": "a"}, line(1, tokens={"ids": "..."}, prompt=None))
    with path.open("a") as file:
        file.write('{"rollout_id": "b", "answ')
    index = RolloutIndex.rebuild(tmp_path)
    bare, found = sorted(index.find().rollouts, key=lambda found: found.rollout_id)
    assert (bare.rollout_id, bare.task, bare.reward, bare.num_tokens, bare.oldest) == ("a", "", None, None, None)
    assert found.num_tokens is None and found.rollout_id == "sums:1:0"


def test_what_the_trainer_saves_is_found(tmp_path: Path) -> None:
    prompt = Prompt(messages=({"role": "user", "content": "Name a river."},), data_source="rivers")
    group: Group = [
        RolloutState(prompt=prompt, task_name="geo", group_id="geo:0", rollout_id=f"geo:0:{k}") for k in range(2)
    ]
    for rollout in group:
        rollout.response = Tokens().append([1, 2, 3], [0.0] * 3, model_step=4)
        rollout.response_text, rollout.reward = "The Danube.", Verdict(0.5)
    path = Trajectories(tmp_path / "trajectories", CharTokenizer()).save_step(5, [group], {})
    index = RolloutIndex(tmp_path)
    index.add(path)
    found = index.find(text="river danube", task="geo", step=5, min_reward=0.5, data_source="rivers").rollouts
    assert [each.rollout_id for each in found] == ["geo:0:1", "geo:0:0"]
    assert {(each.oldest, each.newest, each.num_tokens) for each in found} == {(4, 4, 3)}


class Told:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def notice(self, event: Event) -> None:
        self.events.append(event)


def test_an_index_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).mkdir()
    told = Told()
    index = RolloutIndex(tmp_path, observer=told)
    for _ in range(2):
        index.add(write(tmp_path, "step-1", line(0)))
    index.add(tmp_path / "trajectories" / "step-9.jsonl")
    (event,) = told.events
    assert isinstance(event, Warned) and "the run goes on" in event.text


@pytest.mark.parametrize("content", [b"no database" * 100, None])
def test_a_file_that_is_no_index_of_this_format_is_made_anew(
    tmp_path: Path, index: RolloutIndex, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / INDEX_FILE).write_bytes(content)
        with pytest.raises(RefusedError, match=r"penstock ledger .* --reindex makes it anew"):
            index.find()
    else:
        connection = sqlite3.connect(tmp_path / INDEX_FILE)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    index.add(tmp_path / "trajectories" / "step-2.jsonl")
    assert numbers(index.find().rollouts) == [4, 3]


def test_without_an_index_there_is_a_clear_word_and_no_new_file(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"does not exist; penstock ledger .* --reindex makes it"):
        RolloutIndex(tmp_path).find()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wanted", "bounds", "after"),
    [
        *(({column: "x"}, {}, "7") for column in ("task", "status", "data_source", "group_id", "rollout_id")),
        ({"kind": "train"}, {}, "7"),
        ({"step": 3}, {}, "7"),
        ({"kind": "train", "step": 3}, {}, None),
        ({"task": "x", "step": 3}, {}, "7"),
        ({"task": "x", "status": "y"}, {}, "7"),
        ({}, {">=": 0.5}, "0.75/7"),
        ({"task": "x"}, {">=": 0.5, "<=": 0.9}, "0.75/7"),
    ],
)
def test_no_question_scans_or_sorts(
    tmp_path: Path, index: RolloutIndex, wanted: dict[str, Any], bounds: dict[str, float | None], after: str | None
) -> None:
    for text in ("", "prime"):
        sql, values, _ = _question(_match(text), wanted, bounds, after if not text else None)
        connection = sqlite3.connect(tmp_path / INDEX_FILE)
        plan = [row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql} LIMIT 10", values)]
        connection.close()
        first, *others = plan
        assert first.startswith("SCAN texts VIRTUAL TABLE INDEX" if text else "SEARCH rollouts USING"), plan
        assert all(step.startswith("SEARCH") for step in others), plan
