"""`penstock judge`: saved answers are judged again, and what differs from the record is marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_models import write_model, write_tokenizer

from penstock.cli import main
from penstock.rollout import FinishReason, RolloutState, Status, Tokens, Verdict, new_rollout
from penstock.testing import CharTokenizer
from penstock.trainer.trajectories import Trajectories, read_trajectories

RUN = """
from penstock import *

def judge(response, label, extra_info):
    if response == "?":
        raise ValueError("no idea")
    return {{"score": float(response == label) * extra_info.get("worth", 1), "text": f"saw {{response}}"}}

def rank(responses, label, extra_info):
    return [sorted(responses).index(text) for text in responses]

trainer = RLColocateTrainerConfig(
    model="tiny",
    tasks=TaskSpecConfig(
        task_name="words",
        sampler_config=SamplerConfig(dataset=DatasetConfig(path="nowhere.jsonl"), prompt_repeat_k=2),
        agent_loop_config=SingleTurnAgentLoopConfig(),
        judger_config={judger},
    ),
    total_steps=1,
    train_batch_size=1,
)
"""


def saved(directory: Path) -> Path:
    """Two groups of two: right as recorded, wrong as recorded, recorded otherwise, not to be judged."""
    groups = []
    for number, answers in enumerate([[("a", 1.0), ("b", 0.0)], [("a", 0.0), ("?", 1.0)]]):
        group: list[RolloutState] = []
        for place, (text, score) in enumerate(answers):
            rollout = new_rollout("Say a.", ground_truth="a", data_source="words", extra_info={"worth": 1})
            rollout.response_text = text
            rollout.response = Tokens().append([97], [0.0], model_step=0)
            rollout.group_id, rollout.rollout_id = f"words:{number}", f"words:{number}:{place}"
            rollout.task_name, rollout.reward = "words", Verdict(score)
            rollout.status, rollout.finish_reason = Status.COMPLETED, FinishReason.STOP
            group.append(rollout)
        groups.append(group)
    return Trajectories(directory, CharTokenizer()).save_as("step-000001.jsonl", groups)


def run_file(directory: Path, judger: str = "judge") -> str:
    path = directory / f"run_{abs(hash((str(directory), judger)))}.py"
    path.write_text(RUN.format(judger=judger))
    return str(path)


def test_a_table_of_scores_reasons_latencies_and_disagreements(tmp_path, capsys):
    path = saved(tmp_path)
    assert main(["judge", run_file(tmp_path), "--trajectories", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rollout", "recorded", "judged", "seconds", "reason"]
    assert lines[1].startswith("! words:1:1") and lines[1].endswith("raised ValueError: no idea")
    assert lines[2].split()[:4] == ["!", "words:1:0", "0", "1"]
    assert lines[3].split()[:3] == ["words:0:0", "1", "1"]
    assert lines[3].endswith("saw a")
    assert lines[5] == "4 rollouts: 2 disagree, 1 unjudged, mean score 0.6667"
    assert lines[6].startswith("latency: median ")


def test_as_json_and_with_fewer_lines(tmp_path, capsys):
    path, config = saved(tmp_path), run_file(tmp_path)
    assert main(["judge", config, "--trajectories", str(path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["rollout_id"], row["score"], row["disagrees"]) for row in rows] == [
        ("words:0:0", 1.0, False),
        ("words:0:1", 0.0, False),
        ("words:1:0", 1.0, True),
        ("words:1:1", None, True),
    ]
    assert main(["judge", config, "--trajectories", str(path), "--limit", "1"]) == 0
    assert "... and 3 more" in capsys.readouterr().out


def test_a_relative_judge_gets_whole_groups(tmp_path, capsys):
    config = run_file(tmp_path, "NativeJudgerConfig(reward_handler=rank, per_group=True)")
    assert main(["judge", config, "--trajectories", str(saved(tmp_path)), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["score"] for row in rows] == [0.0, 1.0, 1.0, 0.0]


def test_a_judge_on_the_engines_of_a_run_is_given_engines_here(tmp_path, capsys):
    model = tmp_path / "model"
    write_model("llama", model)
    write_tokenizer(model)
    asks = 'LLMJudgerConfig(template="{response}?", max_retries=0, sample_params=SampleParams(max_tokens=4))'
    config = Path(run_file(tmp_path, asks))
    config.write_text(config.read_text().replace('model="tiny"', f"model={str(model)!r}"))
    assert main(["judge", str(config), "--trajectories", str(saved(tmp_path)), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # A model of random weights never ends its answer.
    assert [(row["score"], row["reason"]) for row in rows] == [(None, "the judge was cut off after 4 tokens")] * 4


def test_what_cannot_be_judged_again_is_refused(tmp_path, capsys):
    path, config = saved(tmp_path), run_file(tmp_path)
    assert main(["judge", config, "--trajectories", str(tmp_path / "none.jsonl")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["judge", config, "--trajectories", str(tmp_path)]) == 2
    assert "a directory; name one file" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"rollout_id": 3}\n')
    assert main(["judge", config, "--trajectories", str(broken)]) == 2
    assert "could not be read" in capsys.readouterr().err
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert main(["judge", config, "--trajectories", str(empty)]) == 2
    assert "has no rollouts" in capsys.readouterr().err
    assert main(["judge", "tiny", "--trajectories", str(path)]) == 2
    assert "has rollouts of task 'words'; the configuration has none" in capsys.readouterr().err
    bad = run_file(tmp_path, "lambda response, label, extra_info: 1.0")
    assert main(["judge", bad, "--trajectories", str(path)]) == 2
    assert "lambda" in capsys.readouterr().err


def test_files_of_earlier_versions_can_be_read(tmp_path):
    path = saved(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("extra_info") == {"worth": 1}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line.extra_info for line in read_trajectories(path)] == [{}] * 4


@pytest.mark.parametrize("wrong", [["judge", "tiny"], ["judge"]])
def test_the_file_must_be_named(wrong):
    with pytest.raises(SystemExit) as caught:
        main(wrong)
    assert caught.value.code == 2
