"""What a timeline holds, without a run."""

from __future__ import annotations

import json

from penstock.trainer.profile import OFF, Profile


def read_spans(path):
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [(lanes[event["tid"]], event) for event in events if event["ph"] != "M"]


def test_a_span_inside_another_lies_within_it(tmp_path):
    profile = Profile()
    with profile.span("step 1"), profile.span("train"):
        pass
    profile.write(tmp_path / "profile.json")
    (outer_lane, outer), (inner_lane, inner) = read_spans(tmp_path / "profile.json")
    assert (outer["name"], inner["name"]) == ("step 1", "train")
    assert outer_lane == inner_lane == "trainer"
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_the_parts_of_a_train_step_follow_each_other_within_its_time(tmp_path):
    profile = Profile()
    seconds = {"seconds/forward": 2.0, "seconds/backward": 3.0, "seconds/optimizer": 2.0, "seconds/total": 6.0}
    profile.parts_of(profile._began, {"loss": 1.0, "micro_batches": 2.0, **seconds})
    profile.write(tmp_path / "profile.json")
    spans = [(event["name"], event["ts"], event["dur"]) for _, event in read_spans(tmp_path / "profile.json")]
    # The last one is cut: what was measured inside must not stand outside.
    assert spans == [("forward", 0, 2_000_000), ("backward", 2_000_000, 3_000_000), ("optimizer", 5_000_000, 1_000_000)]


def test_a_span_that_an_error_ends_is_kept(tmp_path):
    profile = Profile()
    try:
        with profile.span("train"):
            raise RuntimeError
    except RuntimeError:
        profile.write(tmp_path / "profile.json")
    assert [event["name"] for _, event in read_spans(tmp_path / "profile.json")] == ["train"]


def test_rollouts_at_the_same_time_are_told_apart(tmp_path):
    profile = Profile()
    with (
        profile.rollout("generate", task="sums", rollout_id="sums:0:0"),
        profile.rollout("generate", task="sums", rollout_id="sums:0:1"),
    ):
        pass
    profile.write(tmp_path / "profile.json")
    spans = read_spans(tmp_path / "profile.json")
    assert {lane for lane, _ in spans} == {"sums"}
    begun = {event["id"]: event["args"]["rollout"] for _, event in spans if event["ph"] == "b"}
    assert sorted(begun.values()) == ["sums:0:0", "sums:0:1"]
    assert {event["id"] for _, event in spans if event["ph"] == "e"} == begun.keys()


def test_without_a_profile_engine_and_judgers_are_left_as_they_are(tmp_path):
    engine = object()
    assert OFF.wrap_engine(engine) is engine
    assert type(OFF.judgers()).__name__ == "JudgerSet"
    with OFF.span("train"):
        OFF.parts_of(0.0, {"seconds/forward": 1.0})
    OFF.write(tmp_path / "profile.json")
    assert not (tmp_path / "profile.json").exists()
