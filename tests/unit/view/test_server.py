from __future__ import annotations

import contextlib
import io
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from view_runs import (
    HOSTILE,
    branched_group,
    draw_group,
    end_run,
    group_of,
    play_over_restarts,
    restart,
    saved_in,
    step_events,
    tell,
    tell_of_sync,
)

from penstock.errors import RefusedError
from penstock.events import ArithmeticChosen, Warned
from penstock.replay import DiscardReason, ReplayBuffer
from penstock.trainer.observers import EVENTS_FILE
from penstock.view.runs import Runs
from penstock.view.server import COOKIE, PAGE


def paths(client: TestClient) -> list[str]:
    app: Any = client.app
    found = [route.path for route in app.routes]
    assert len(found) > 10
    return [path.replace("{run}", "first").replace("{file}", "app.js") for path in found]


def test_every_route_refuses_who_has_no_token_or_a_wrong_one(stranger: TestClient) -> None:
    for path in paths(stranger):
        assert stranger.get(path).status_code == 401, path
        assert stranger.get(path, params={"token": "wrong"}).status_code == 401, path
        assert stranger.get(path, headers={"Cookie": f"{COOKIE}=wrong"}).status_code == 401, path


def test_the_printed_address_is_left_for_one_without_the_token(stranger: TestClient, token: str) -> None:
    answer = stranger.get("/", params={"token": token})
    assert answer.status_code == 307 and answer.headers["location"] == "/"
    assert stranger.get("/").status_code == 200


def test_nothing_can_be_changed(client: TestClient) -> None:
    for path in paths(client):
        assert client.post(path).status_code == 405, path


def test_only_files_of_the_page_are_served_and_nothing_comes_from_elsewhere(client: TestClient) -> None:
    for name in ("..%2Fserver.py", "%2e%2e/server.py", "nothing.js", "__init__.py"):
        assert client.get(f"/page/{name}").status_code == 404
    assert "default-src 'none'" in client.get("/").headers["content-security-policy"]
    for file in PAGE.iterdir():
        addresses = set(re.findall(r"https?://[^\s\"'`]+", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file
        assert "innerHTML" not in file.read_text() and "eval(" not in file.read_text()


def test_now_counts_every_group_and_says_who_is_there(client: TestClient) -> None:
    now = client.get("/api/first/now").json()
    states = now["tasks"]["sums"]
    assert (states["trained"], states["discarded"], states["completed"]) == (1, 1, 1) and sum(states.values()) == 3
    assert now["step"] == 2 and now["total_steps"] == 4 and now["published"] == 2
    assert now["engines"]["engine-0"]["state"] == "active" and now["tokens"]["generated"] == 200
    load = now["engines"]["engine-0"]["load"]
    assert (load["model_step"], load["running"], load["waiting"], load["busy"]) == (2, 3, 1, 0.75)


def test_now_tells_what_went_into_each_part_of_the_pipe(client: TestClient, run_dir: Path) -> None:
    assert client.get("/api/first/now").json()["rates"] == {}
    trained = {"trained_tokens": 200.0, "staleness/masked_tokens": 40.0, "length/masked_tokens": 10.0}
    made = {"produce/rollouts": 16.0, "tokens/generated": 400.0, "tokens/wasted": 60.0}
    tell(run_dir, *step_events(3, **made, **trained, **{"time/step_s": 2.0}))
    now = client.get("/api/first/now").json()
    assert now["rates"] == {"running": 8.0, "completed": 200.0, "leased": 125.0, "trained": 100.0, "lost": 30.0}
    assert now["tokens"] == {"generated": 600.0, "trained": 200.0, "wasted": 60.0}


def test_now_tells_the_arithmetic_that_was_chosen(client: TestClient, run_dir: Path) -> None:
    assert client.get("/api/first/now").json()["arithmetic"] == ""
    tell(run_dir, ArithmeticChosen(train="float32", engine="bfloat16", cpu="a CPU", others_take={"train": 2.25}))
    assert client.get("/api/first/now").json()["arithmetic"] == (
        "arithmetic: training float32 (bfloat16 takes 2.2x as long), engine bfloat16, on a CPU"
    )


def test_a_run_whose_driver_is_gone_is_killed_and_one_that_ended_is_done(client: TestClient, run_dir: Path) -> None:
    assert client.get("/api/first/now").json()["state"] == "killed"
    end_run(run_dir)
    assert client.get("/api/first/now").json()["state"] == "done"


def test_what_is_appended_is_seen_by_the_next_question(client: TestClient, run_dir: Path) -> None:
    assert client.get("/api/runs").json()["runs"][0]["step"] == 2
    tell(run_dir, *step_events(3))
    assert client.get("/api/runs").json()["runs"][0]["step"] == 3


def test_curves_are_by_name(client: TestClient) -> None:
    assert "reward/mean" in client.get("/api/first/curves").json()["names"]
    asked = client.get("/api/first/curves", params={"name": ["reward/mean", "eval/accuracy", "none"]}).json()
    assert asked["curves"] == {"reward/mean": [[1, 0.1], [2, 0.2]], "eval/accuracy": [[0, 0.25]], "none": []}


def test_a_rollout_is_found_by_its_words_and_read_token_by_token(client: TestClient) -> None:
    found = client.get("/api/first/rollouts", params={"text": "script alert"}).json()["rollouts"]
    assert {one["rollout_id"] for one in found} == {"sums:0:0", "sums:0:1"}
    rollout = client.get("/api/first/rollout", params={"id": "sums:0:1", "step": 1}).json()
    [segment] = rollout["segments"]
    assert len(segment["texts"]) == len(HOSTILE) + 1 and segment["mask"][-1] == 0
    assert segment["logprobs"][0] == -0.5 and segment["trainer_logprobs"][0] == -0.25
    assert rollout["turns"][0]["text"] == HOSTILE and rollout["turns"][1]["name"] == "add"
    assert rollout["advantage"] == 1.0 and rollout["reward"]["parts"] == {"right": 1.0}
    assert [one["reward"] for one in rollout["siblings"]] == [0.0, 1.0]


def test_a_rollout_of_several_segments_has_each_where_it_begins(client: TestClient, run_dir: Path) -> None:
    saved_in(run_dir).save_step(2, [branched_group(3)], {})
    rollout = client.get("/api/first/rollout", params={"id": "sums:3:0", "step": 2}).json()
    first, second = rollout["segments"]
    assert (first["parent"], first["start"], second["parent"], second["start"]) == (-1, -1, 0, 3)
    assert second["ids"] == list(b"again") and second["model_steps"] == [1] * 5
    assert [turn["segment"] for turn in rollout["turns"]] == [0, 0, 1]


def test_answers_are_json_that_no_browser_takes_for_a_page(client: TestClient) -> None:
    answer = client.get("/api/first/rollout", params={"id": "sums:0:1", "step": 1})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_rewards_are_binned(client: TestClient) -> None:
    histogram = client.get("/api/first/histogram", params={"step": 1}).json()
    assert histogram["of"] == 2 and histogram["counts"][0] == histogram["counts"][-1] == 1


def test_what_was_not_trained_has_its_reason_its_cost_and_its_story(client: TestClient) -> None:
    costs = client.get("/api/first/untrained").json()
    tokens = 2 * (len("fine") + 1)
    assert costs["discarded"] == {
        "retries_exhausted": {"groups": 1, "tokens": tokens, "tokens_per_group": float(tokens)}
    }
    [group] = client.get("/api/first/groups", params={"state": "discarded"}).json()["groups"]
    assert group["group_id"] == "sums:1"
    story = client.get("/api/first/group", params={"id": "sums:1"}).json()
    assert "the engine said nothing" in story["why_not_trained"]
    assert [move["state"] for move in story["transitions"]] == ["running", "discarded"]


def test_a_story_goes_over_attempts_and_restarts(client: TestClient, run_dir: Path) -> None:
    play_over_restarts(run_dir)
    story = client.get("/api/first/group", params={"id": "sums:3"}).json()
    moves, [restarted] = story["transitions"], story["restarts"]
    before = [move["state"] for move in moves if move["event"] <= restarted["after_event"]]
    after = [move["state"] for move in moves if move["event"] > restarted["after_event"]]
    assert before == ["running", "aborted", "running"]
    assert after == ["aborted", "running", "completed", "leased", "trained"]
    assert restarted["checkpoint_step"] == 1 and len(client.get("/api/first/group?id=sums:2").json()["restarts"]) == 2


def test_what_was_dropped_has_its_length_beside_what_was_trained(client: TestClient, run_dir: Path) -> None:
    def drop(buffer: ReplayBuffer) -> None:
        long = group_of(3, 3 * HOSTILE)
        draw_group(buffer, long)
        buffer.discard(long, "sums", DiscardReason.FILTERED, train_step=2)

    restart(run_dir, drop, after_s=100)
    costs = client.get("/api/first/untrained").json()
    assert costs["trained"] == {"tokens_per_group": 2.0 * (len(HOSTILE) + 1)}
    assert costs["discarded"]["filtered"]["tokens_per_group"] == 2.0 * (3 * len(HOSTILE) + 1)


def test_a_batch_has_its_groups_and_a_lane_for_each_of_its_rollouts(client: TestClient) -> None:
    batch = client.get("/api/first/batch", params={"step": 1}).json()
    [group] = batch["groups"]
    assert group["group_id"] == "sums:0"
    assert [state for state, _, _ in group["moves"]] == ["running", "completed", "leased", "trained"]
    first, second = batch["lanes"]
    assert (first["rollout_id"], second["rollout_id"], second["reward"]) == ("sums:0:0", "sums:0:1", 1.0)
    told = [(what, round(end - begin, 3), version) for what, begin, end, version in first["spans"]]
    assert told == [
        ("queue", 0.1, None),
        ("queue", 0.1, None),
        ("generate", 0.3, 0),
        ("tool", 0.2, None),
        ("judge", 0.1, None),
        ("siblings", 0.2, None),
        ("buffer", 1.0, None),
        ("train", 1.0, None),
    ]
    assert [what for what, *_ in second["spans"]][-4:] == ["judge", "siblings", "buffer", "train"]


def test_a_run_that_kept_no_times_has_the_moves_of_its_groups_alone(client: TestClient, run_dir: Path) -> None:
    file = run_dir / "trajectories" / "step-000001.jsonl"
    file.write_text(re.sub(r',"played":\[.*?\]\]', "", file.read_text()))
    batch = client.get("/api/first/batch", params={"step": 1}).json()
    assert len(batch["groups"]) == 1 and batch["lanes"] == []


def test_the_timeline_has_the_stages_of_its_steps(client: TestClient) -> None:
    line = client.get("/api/first/timeline").json()
    assert line["steps"] == [1, 2] and {span[1] for span in line["spans"]} == {"step", "produce", "train"}
    assert client.get("/api/first/timeline", params={"last": 1}).json()["steps"] == [1]


def test_a_pause_is_a_span_of_its_own_within_the_sync_that_waits_for_it(client: TestClient, run_dir: Path) -> None:
    tell_of_sync(run_dir, 3)
    spans = client.get("/api/first/timeline").json()["spans"]
    assert [span[1:] for span in spans if span[1] in ("sync", "pause")] == [
        ["sync", 3, 106.0, 110.0],
        ["pause", None, 107.0, 109.0],
    ]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/nowhere/now", 404),
        ("/api/..%2f..%2fetc/now", 404),
        ("/api/first/groups?state=nonsense", 400),
        ("/api/first/groups", 400),
        ("/api/first/group?id=sums:99", 404),
        ("/api/first/rollout?id=sums:0:1", 400),
        ("/api/first/rollout?id=none&step=1", 404),
        ("/api/first/batch?step=one", 400),
        ("/api/first/rollouts?after=x/y", 400),
    ],
)
def test_a_bad_question_gets_a_short_answer(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]


def test_a_directory_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="has no run"):
        Runs(tmp_path)


def test_a_run_directory_itself_may_be_given(run_dir: Path) -> None:
    assert Runs(run_dir).names() == ["first"]


def test_figures_that_are_no_numbers_do_not_end_the_page(client: TestClient, run_dir: Path) -> None:
    nan = {"judger/unjudged": math.nan, "train/mismatch/k3_kl": math.inf, "length/truncated_share": math.nan}
    for step in range(3, 7):
        tell(run_dir, *step_events(step, **nan, **{"tokens/wasted": math.nan}))
    now = client.get("/api/first/now").json()
    assert now["step"] == 6 and now["tokens"]["wasted"] == 0
    assert client.get("/api/first/curves", params={"name": "tokens/wasted"}).json()["curves"]["tokens/wasted"] == []


def test_a_number_that_no_run_has_is_refused(client: TestClient) -> None:
    for question in ("batch?step=", "rollouts?step=", "groups?state=trained&after=", "rollout?id=x&step="):
        assert client.get(f"/api/first/{question}{10**30}").status_code == 400, question


class Meeting(io.FileIO):
    """A file whose readers wait for one another when they have read, for a while."""

    both = threading.Barrier(2)

    def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
        found = super().read(-1 if size is None else size) or b""
        with contextlib.suppress(threading.BrokenBarrierError):
            self.both.wait(timeout=0.2)
        return found


class MeetingPath:
    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, mode: str) -> Meeting:
        return Meeting(self._path)


def test_two_questions_at_once_read_every_event_once(run_dir: Path) -> None:
    runs = Runs(run_dir.parent)
    run = runs.get("first")
    assert run is not None
    tell(run_dir, *[Warned(text=str(number)) for number in range(100)])
    history: Any = run.history
    history.path = MeetingPath(run_dir / EVENTS_FILE)
    asking = [threading.Thread(target=runs.get, args=("first",)) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert [told.text for told in run.history.told] == ["something odd", *map(str, range(100))]
    tell(run_dir, Warned(text="the last"))
    runs.get("first")
    assert run.history.told[-1].text == "the last"
