import importlib.util
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.judger import NativeJudgerConfig, worker
from penstock.rollout import RolloutState, new_rollout

from .machine import Host

FILE = Path(__file__).with_name("reward_functions.py")


@pytest.fixture(scope="session")
def rewards():
    """The module of reward functions, loaded under a name that no import finds, as a configuration file is."""
    spec = importlib.util.spec_from_file_location("a_configuration_file", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["a_configuration_file"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_config():
    def make(handler, **fields):
        return NativeJudgerConfig(reward_handler=handler, **({"num_workers": 1, "max_retries": 0} | fields))

    return make


@pytest.fixture
def answered():
    def make(text: str, label=None, **fields) -> RolloutState:
        rollout = new_rollout("question", ground_truth=label, **fields)
        rollout.response_text = text
        return rollout

    return make


@pytest.fixture
def workers():
    """The living worker processes that this process started since the test began, by their ids, as the system sees."""

    def find():
        return [child.pid for child in psutil.Process().children() if is_worker(child)]

    before = set(find())
    return lambda: sorted(set(find()) - before)


def is_worker(process):
    try:
        return worker.__file__ in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def is_gone():
    """Whether a process ends within a few seconds; a zombie that nobody reaps has ended too."""

    def check(pid: int) -> bool:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                return True
            if state == "Z":
                return True
            time.sleep(0.01)
        return False

    return check


@pytest.fixture
def host(tmp_path, monkeypatch):
    made = Host(tmp_path)
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", made.token)
    yield made
    made.close()
