from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.view.lanes import MAX_LANES, Activity, rollout_lanes

MOVES = [("running", 0.0, None), ("completed", 10.0, None), ("leased", 12.0, None), ("trained", 13.0, None)]


def save(run_dir: Path, *rollouts: dict[str, Any], step: int = 1) -> None:
    (run_dir / "trajectories").mkdir(exist_ok=True)
    lines = [json.dumps({"rollout_id": f"g:{k}", "group_id": "g", **rollout}) for k, rollout in enumerate(rollouts)]
    (run_dir / "trajectories" / f"step-{step:06d}.jsonl").write_text("\n".join(lines))


def spans(run_dir: Path, moves: list[Any], **rollout: Any) -> list[tuple[Any, ...]]:
    save(run_dir, rollout)
    [lane], _ = rollout_lanes(run_dir, 1, [{"group_id": "g", "moves": moves}])
    return [(span.what, span.begin, span.end, span.version) for span in lane.spans]


def test_generation_is_cut_where_the_weights_changed(tmp_path: Path) -> None:
    played = [["generate", 0.0, 4.0], ["tool", 4.0, 1.0], ["generate", 5.0, 4.0]]
    assert spans(tmp_path, MOVES, played=played, model_steps=[[3, 30], [4, 10]]) == [
        ("generate", 0.0, 4.0, 3),
        ("tool", 4.0, 5.0, None),
        ("generate", 5.0, 7.0, 3),
        ("generate", 7.0, 9.0, 4),
        ("siblings", 9.0, 10.0, None),
        ("buffer", 10.0, 12.0, None),
        ("train", 12.0, 13.0, None),
    ]


def test_an_interrupted_rollout_has_what_it_did_in_each_playing(tmp_path: Path) -> None:
    moves = [("running", 0.0, None), ("aborted", 3.0, None), ("running", 5.0, None), *MOVES[1:]]
    played = [["generate", 1.0, 2.5], ["generate", 5.0, 5.0]]
    assert spans(tmp_path, moves, played=played, model_steps=[[3, 1]])[:4] == [
        ("queue", 0.0, 1.0, None),
        ("generate", 1.0, 3.0, 3),
        ("interrupted", 3.0, 5.0, None),
        ("generate", 5.0, 10.0, 3),
    ]


def test_a_rollout_without_times_beside_one_that_has_them_is_played_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path, {"played": [["judge", 1.0, 1.0]]}, {})
    lanes, left_out = rollout_lanes(tmp_path, 1, [{"group_id": "g", "moves": MOVES}])
    assert [span.what for span in lanes[1].spans] == ["play", "buffer", "train"] and left_out == 0


@pytest.mark.parametrize("text", [None, "torn {"])
def test_a_batch_whose_trajectories_are_not_there_has_no_lanes(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        save(tmp_path)
        (tmp_path / "trajectories" / "step-000001.jsonl").write_text(text)
    assert rollout_lanes(tmp_path, 1, [{"group_id": "g", "moves": MOVES}]) == ([], 0)


def test_no_more_lanes_than_one_can_read(tmp_path: Path) -> None:
    save(tmp_path, *[{"played": [["generate", 1.0, 1.0]]}] * (MAX_LANES + 3))
    lanes, left_out = rollout_lanes(tmp_path, 1, [{"group_id": "g", "moves": MOVES}])
    assert (len(lanes), left_out) == (MAX_LANES, 3)


def test_activity_is_how_many_did_what_at_a_time(tmp_path: Path) -> None:
    save(
        tmp_path, {"played": [["generate", 0.0, 80.0]]}, {"played": [["generate", 40.0, 120.0], ["judge", 159.0, 1.0]]}
    )
    activity = Activity(tmp_path)
    strips = activity.strips([1, 2], 0.0, 160.0)
    assert strips["generate"][0] == 1.0 and strips["generate"][60] == 2.0 and strips["generate"][159] == 1.0
    assert strips["judge"][:159] == [0.0] * 159 and strips["judge"][159] == 1.0
    save(tmp_path, {"played": [["judge", 0.0, 160.0]]}, step=2)
    assert activity.strips([1, 2], 0.0, 160.0)["judge"][0] == 1.0
