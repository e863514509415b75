"""The commands that the documents show: how a test runs each of them, or why it does not.

One place for all. A command that stands in a document and in neither list fails a test, and so does one that is listed
and stands in no document any more.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("penstock", "make", "pip", "ray", "ssh", "export", "apt-get")

SHORT = ("--set", "total_steps=2", "--set", "evaluator=null")
"""Added to what trains, so that it takes seconds."""


class Played(NamedTuple):
    """Run as it stands, with these arguments after it; `says` is in what it prints."""

    added: tuple[str, ...] = ()
    says: str = ""
    makes: str = ""
    """A file that is there afterwards."""


class Served(NamedTuple):
    """Run until it printed `says`, then asked over HTTP and ended by Ctrl-C."""

    says: str


class LeftOut(NamedTuple):
    """Not run by the tests of the documents."""

    why: str
    by: str = ""
    """The test that takes this path, where there is one."""


def short(run_dir: str, *more: str) -> Played:
    return Played((*SHORT, *more), makes=f"{run_dir}/summary.json")


COMMANDS: dict[str, Played | Served | LeftOut] = {
    # In this order: a command finds what those before it made.
    "penstock recipes": Played(says="quickstart-vllm"),
    "penstock recipes show tiny": Played(says="RLColocateTrainerConfig("),
    "penstock recipes copy tiny": Played(makes="tiny.py"),
    "penstock recipes copy tiny my_run.py": Played(makes="my_run.py"),
    "penstock models": Played(says="smollm2-135m"),
    "penstock train tiny": short("runs/tiny"),
    "penstock train my_run.py": short("runs/my_run"),
    "penstock train tiny --run-dir runs/small --set train.lr=5e-4 --set train_batch_size=8": short("runs/small"),
    "penstock train tiny --run-dir runs/mine": Played(
        ("--set", "total_steps=1", "--set", "evaluator=null"), makes="runs/mine/summary.json"
    ),
    "penstock train tiny --run-dir runs/mine --resume": Played(("--set", "total_steps=2"), says="steps"),
    "penstock train tiny --run-dir runs/mine --resume --set train.lr=5e-4 --allow-change train.lr": Played(
        ("--set", "total_steps=3"), says="steps"
    ),
    "penstock train tiny --run-dir runs/auto --resume auto": short("runs/auto"),
    "penstock train tiny --run-dir runs/apart --set engines.engine.process=true": short("runs/apart"),
    "penstock train tiny-async --run-dir runs/two-engines --set engines.num_engines=2": short("runs/two-engines"),
    "penstock train agent-cli": short("runs/agent-cli", "--set", "train_batch_size=2"),
    "penstock train agent-openai": short("runs/agent-openai", "--set", "train_batch_size=2"),
    "penstock eval tiny --model runs/tiny/hf/final": Played(
        ("--set", "evaluator.eval_sample_num=8"), makes="evals/tiny/result.json"
    ),
    "penstock judge tiny --trajectories runs/tiny/trajectories/step-000001.jsonl": Played(says="reverse:"),
    "penstock judge tiny --trajectories runs/tiny/trajectories/step-000001.jsonl "
    "--set manager.tasks.0.judger_config=penstock.judger.rewards.matching_characters": Played(says="reverse:"),
    "penstock runs": Played(says="two-engines"),
    "penstock ledger runs/mine": Played(says="trained"),
    "penstock ledger runs/mine reverse:3": Played(says="reverse:3"),
    "penstock ledger runs/mine --state discarded": Played(),
    "penstock plot runs/quickstart -o curve.png": Played(says="curve.png", makes="curve.png"),
    "penstock view runs/mine": Served("open http://127.0.0.1:"),
    "penstock view runs/tiny": Served("open http://127.0.0.1:"),
    "penstock view runs/quickstart": Served("open http://127.0.0.1:"),
    "penstock view runs": Served("open http://127.0.0.1:"),
    "penstock view --demo": Served("open http://127.0.0.1:"),
    "penstock view runs --port 8700": Served("open http://127.0.0.1:8700/"),
    "penstock serve runs/agent-openai": Served("http://127.0.0.1:"),
    "penstock serve runs/quickstart": LeftOut(
        "the same command on a run whose model is larger", by="test_a_trained_run_is_served_to_any_client"
    ),
    "make demo": LeftOut(
        "trains SmolLM2 for minutes", by="test_the_demo_ends_with_its_picture_and_the_line_for_the_page"
    ),
    "make test": LeftOut("runs the tests"),
    "make setup-vllm": LeftOut("installs vLLM: minutes; `make test-vllm` begins with it"),
    "make setup-verifiers": LeftOut("installs verifiers; `make test-verifiers` begins with it"),
    "pip install torch==2.13.0": LeftOut("what `make setup` does, into another environment"),
    "pip install -c constraints.txt -e '.[math,gym,ray,serve,lora,plot]'": LeftOut(
        "what `make setup` does, into another environment"
    ),
    "penstock train quickstart-vllm": LeftOut(
        "trains SmolLM2 for minutes with vLLM",
        by="test_a_short_run_learns_and_its_metrics_tell_of_staleness_mismatch_and_sync",
    ),
    "penstock train quickstart-vllm --run-dir runs/two-engines --set engines.num_engines=2": LeftOut(
        "trains SmolLM2 for minutes with two vLLM"
    ),
    "penstock train tiny-ray --address local": LeftOut("starts a Ray cluster: `make test-ray` does"),
    "penstock train tiny-ray --address auto": LeftOut("needs a cluster", by="test_two_actors_of_each_give_them_too"),
    "penstock train tiny-ray --address FIRST_NODE:6379": LeftOut("needs a cluster of several machines"),
    "penstock eval tiny-ray --model runs/tiny-ray/hf/final --address auto": LeftOut(
        "needs a cluster", by="test_an_evaluation_runs_on_the_cluster_too"
    ),
    "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')": LeftOut(
        "sets up a cluster of several machines"
    ),
    "ray start --head --port 6379 --block": LeftOut("sets up a cluster of several machines"),
    "ray start --address FIRST_NODE:6379 --block": LeftOut("sets up a cluster of several machines"),
    "penstock engines runs/tiny-async": LeftOut(
        "needs a run that is under way", by="test_engines_join_and_leave_a_disaggregated_run_and_nothing_is_lost"
    ),
    "penstock engines runs/tiny-async add": LeftOut(
        "needs a run that is under way", by="test_engines_join_and_leave_a_disaggregated_run_and_nothing_is_lost"
    ),
    "penstock engines runs/tiny-async drain engine-0": LeftOut(
        "needs a run that is under way", by="test_engines_join_and_leave_a_disaggregated_run_and_nothing_is_lost"
    ),
    "ssh -L 8700:127.0.0.1:8700 machine": LeftOut("needs a second machine"),
}


def shown(document: Path) -> list[str]:
    """The commands of the code blocks of a document, without comments, continued lines joined."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            command = re.sub(r"\s+# .*", "", line).strip().removeprefix(".venv/bin/")
            if command.split(" ")[0] in PROGRAMS:
                found.append(command)
    return found


def all_shown() -> set[str]:
    return {command for document in DOCUMENTS for command in shown(document)}
