"""What is refused of a verifiers taskset before its environment is asked; tests/verifiers has the real thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.agent_loop import VerifiersAgentLoopConfig
from penstock.data import VerifiersTasksetConfig
from penstock.data.verifiers import verifiers_environment
from penstock.errors import ConfigError, DatasetError
from penstock.models.tiny_chat import _tokenizer
from penstock.models.tokenizer import HFTokenizer


def taskset(python: Path | str, **options: object) -> VerifiersTasksetConfig:
    return VerifiersTasksetConfig(taskset="sums", python=str(python), **options)


def program(directory: Path, text: str) -> Path:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def load(tasks: VerifiersTasksetConfig, directory: Path) -> None:
    inner = _tokenizer()
    tokenizer = HFTokenizer(inner, frozenset({inner.eos_token_id}), directory)
    tasks.load(tokenizer, context=None, max_tokens=8, data_sources=None)


def test_an_environment_that_is_not_there_is_named_with_what_installs_it():
    with pytest.raises(ConfigError, match=r"there is no nowhere/python; `make setup-verifiers` installs it"):
        taskset("nowhere/python").check()


def test_settings_that_cannot_be_sent_and_a_missing_directory_are_told_together(tmp_path):
    tasks = taskset(program(tmp_path, ""), directory="nowhere", taskset_arguments={"id": "other", "f": print})
    with pytest.raises(ConfigError) as refused:
        tasks.check()
    assert len(refused.value.problems) == 3


def test_what_the_run_decides_is_not_decided_again(tmp_path):
    config = VerifiersAgentLoopConfig(
        taskset=taskset(program(tmp_path, "")), command=["true"], agent_arguments={"model": "gpt"}
    )
    with pytest.raises(ConfigError) as refused:
        config.check()
    assert [problem.partition(" ")[0] for problem in refused.value.problems] == ["command", "agent_arguments"]


def test_a_process_that_ends_without_a_word_is_quoted(tmp_path):
    with pytest.raises(DatasetError, match=r"(?s)ended with code 3: .*no module named verifiers"):
        load(taskset(program(tmp_path, "echo no module named verifiers >&2; exit 3")), tmp_path)


def test_tasks_that_are_not_loaded_in_time_are_refused(tmp_path):
    with pytest.raises(DatasetError, match=r"not loaded within timeout_s 0\.2"):
        load(taskset(program(tmp_path, "exec sleep 60"), timeout_s=0.2), tmp_path)


def test_its_process_sees_its_own_programs_first_and_nothing_of_the_run(monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", "here")
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    own = verifiers_environment("/env/bin/python", [])
    assert own["PATH"].startswith("/env/bin:")
    assert not own.keys() & {"PENSTOCK_HOME", "PYTHONPATH", "PRIME_API_KEY"}
    assert verifiers_environment("/env/bin/python", ["PRIME_API_KEY"])["PRIME_API_KEY"] == "secret"
