"""What a child process sees of the environment."""

from __future__ import annotations

import pytest

from penstock.environment import child_environment


def test_what_programs_need_is_passed_on_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = ["PATH", "HF_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "LC_ALL"]
    kept_back = ["AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL", "MY_CANARY"]
    for name in (*passed, *kept_back):
        monkeypatch.setenv(name, f"value of {name}")
    environment = child_environment()
    assert all(environment[name] == f"value of {name}" for name in passed)
    assert not environment.keys() & set(kept_back)


def test_a_name_that_is_asked_for_is_passed_on_if_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    environment = child_environment(["HF_TOKEN", "NOT_SET"])
    assert environment["HF_TOKEN"] == "hf_canary"
    assert "NOT_SET" not in environment
