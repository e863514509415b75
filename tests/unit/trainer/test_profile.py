"""What a timeline holds, without a run."""

from __future__ import annotations

import json

from penstock.events import StageBegan, StageEnded, StepTrained
from penstock.trainer.profile import Profile


def read_spans(path):
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [(lanes[event["tid"]], event) for event in events if event["ph"] != "M"]


def test_a_stage_inside_another_lies_within_it(tmp_path):
    profile = Profile(tmp_path / "profile.json")
    for stage in ("step", "train"):
        profile.notice(StageBegan(stage=stage, train_step=1))
    profile.notice(StageBegan(stage="eval", lane="evaluation"))
    for stage in ("train", "step"):
        profile.notice(StageEnded(stage=stage, train_step=1, seconds=0.0))
    profile.notice(StageEnded(stage="eval", lane="evaluation", seconds=0.0))
    profile.close()
    spans = read_spans(tmp_path / "profile.json")
    outer, inner = (event for lane, event in spans if lane == "trainer")
    assert (outer["name"], inner["name"]) == ("step 1", "train")
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert [event["name"] for lane, event in spans if lane == "evaluation"] == ["eval"]


def test_the_parts_of_a_train_step_follow_each_other_within_its_time(tmp_path):
    profile = Profile(tmp_path / "profile.json")
    profile.notice(StageBegan(stage="train", train_step=1))
    profile.notice(StageEnded(stage="train", train_step=1, seconds=6.0))
    seconds = {"seconds/forward": 2.0, "seconds/backward": 3.0, "seconds/optimizer": 2.0, "seconds/total": 6.0}
    metrics = {f"train/{name}": value for name, value in {"loss": 1.0, "micro_batches": 2.0, **seconds}.items()}
    profile.notice(StepTrained(train_step=1, metrics=metrics))
    profile.close()
    events = [event for _, event in read_spans(tmp_path / "profile.json")]
    began = events[0]["ts"]
    spans = [(event["name"], round((event["ts"] - began) / 1e6), round(event["dur"] / 1e6)) for event in events]
    # The last one is cut: what was measured inside must not stand outside.
    parts = [("forward", 0, 2), ("backward", 2, 3), ("optimizer", 5, 1)]
    assert sorted(spans[:2]) == [("forward", 0, 2), ("train", 0, 0)] and spans[2:] == parts[1:]


def test_rollouts_at_the_same_time_are_told_apart(tmp_path):
    profile = Profile(tmp_path / "profile.json")
    with (
        profile.rollout("generate", task="sums", rollout_id="sums:0:0"),
        profile.rollout("generate", task="sums", rollout_id="sums:0:1"),
    ):
        pass
    profile.close()
    spans = read_spans(tmp_path / "profile.json")
    assert {lane for lane, _ in spans} == {"sums"}
    begun = {event["id"]: event["args"]["rollout"] for _, event in spans if event["ph"] == "b"}
    assert sorted(begun.values()) == ["sums:0:0", "sums:0:1"]
    assert {event["id"] for _, event in spans if event["ph"] == "e"} == begun.keys()
