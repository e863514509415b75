"""Real processes, real files, SIGKILL: a few kills here; `make crash-quick` and `make crash` make more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long_tier
@pytest.mark.timeout(600)
def test_kills_of_real_runs_lose_skip_and_double_nothing():
    kills = 10  # the tier of crashes makes sixty
    command = [sys.executable, str(Path(__file__).with_name("runner.py")), "--kills", str(kills), "--seed", "10"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verdict = json.loads(ended.stdout.splitlines()[-1])
    assert verdict.pop("in_writes") >= kills // 10
    assert verdict == {"kills": kills, "lost": 0, "skipped": 0, "doubled": 0}
