"""`penstock train --profile` on real runs: a trace that a viewer can read, with every stage where it belongs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest


@pytest.mark.parametrize(
    "recipe",
    [pytest.param("tiny", marks=pytest.mark.soak_tier), pytest.param("tiny-async", marks=pytest.mark.long_tier)],
)
def test_a_profiled_run_leaves_a_timeline_of_its_stages(penstock, tmp_path, recipe):
    settings = ("total_steps=2", "train_batch_size=4", "checkpoint_interval=2", "evaluator.eval_sample_num=8")
    run = penstock("train", recipe, "--run-dir", "run", "--profile", *(f"--set={setting}" for setting in settings))
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    events = json.loads((tmp_path / "run" / "profile.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    by_lane = defaultdict(list)
    for event in timed:
        by_lane[lanes[event["tid"]]].append(event)
    check_nesting(by_lane["trainer"])
    check_nesting(by_lane["evaluation"])
    stages = Counter(event["name"] for event in by_lane["trainer"])
    wanted = ("step 1", "step 2", "produce", "prepare", "train", "forward", "backward", "clip", "optimizer", "commit")
    assert all(stages[name] for name in (*wanted, "ledger flush", "checkpoint")), stages
    # Written beside the steps, one after the other.
    check_nesting(by_lane["checkpoint"])
    assert {"write checkpoint", "export"} <= {event["name"] for event in by_lane["checkpoint"]}
    assert ("sync" in stages) and "eval" in {event["name"] for event in by_lane["evaluation"]}
    # 2 steps of 4 groups of 8, at least; each answer is judged, and everything that began has ended.
    rollouts = Counter((event["name"], event["ph"]) for event in timed if event["ph"] in "be")
    assert rollouts["generate", "b"] == rollouts["generate", "e"] >= 64
    assert rollouts["judge", "b"] == rollouts["judge", "e"] >= 64
    check_nesting(by_lane["engine"])
    steps = {event["name"] for event in by_lane["engine"]}
    # An engine in a process of its own is not on this one's timeline.
    assert steps == ({"prefill", "decode", "sample", "load weights"} if recipe == "tiny" else set())
    check_parents(by_lane["trainer"], {"train": "step", "forward": "train", "optimizer": "train", "produce": "step"})


def check_nesting(spans):
    """In one lane a span lies within the one around it or after it."""
    open_ends = []
    for span in spans:
        start, end = span["ts"], span["ts"] + span["dur"]
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert span["dur"] >= 0 and (not open_ends or end <= open_ends[-1]), span
        open_ends.append(end)


def check_parents(spans, parents):
    for span in spans:
        parent = parents.get(span["name"])
        around = [s for s in spans if s["ts"] <= span["ts"] and span["ts"] + span["dur"] <= s["ts"] + s["dur"]]
        assert parent is None or any(other["name"].startswith(parent) for other in around), span
