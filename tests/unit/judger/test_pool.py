"""Worker processes: they end when they should, with all they started, and the pool keeps its size."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.rollout import Unjudged, Verdict

REWARDS = Path(__file__).with_name("reward_functions.py")


def test_no_process_is_left_after_close(rewards, make_config, answered, workers, is_gone):
    judger = make_config(rewards.by_command, num_workers=3, timeout_s=60).build()

    async def run():
        calls = [asyncio.create_task(judger.judge(answered(text))) for text in ("hang", "hang", "pid")]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        pids = workers()
        started = asyncio.get_running_loop().time()
        await judger.close()
        took = asyncio.get_running_loop().time() - started
        await asyncio.gather(*calls)
        return pids, took

    pids, took = asyncio.run(run())
    assert len(pids) == 3
    assert all(is_gone(pid) for pid in pids)
    assert took < 1.5
    assert workers() == []


def test_what_the_function_started_is_killed_with_it(rewards, make_config, answered, is_gone, tmp_path):
    written = tmp_path / "child"
    judger = make_config(rewards.by_command, timeout_s=1.0).build()

    async def run():
        answer = await judger.judge(answered("hang with a child", str(written)))
        await judger.close()
        return answer

    assert isinstance(asyncio.run(run()), Unjudged)
    assert is_gone(int(written.read_text()))


def test_a_cancelled_call_kills_its_worker_and_the_next_gets_a_fresh_one(rewards, make_config, answered, is_gone):
    judger = make_config(rewards.by_command, timeout_s=60).build()

    async def run():
        first = (await judger.judge(answered("pid"))).score
        hanging = asyncio.create_task(judger.judge(answered("hang")))
        await asyncio.sleep(0.05)
        hanging.cancel()
        await asyncio.wait({hanging})
        second = (await judger.judge(answered("pid"))).score
        await judger.close()
        return hanging.cancelled(), int(first), int(second)

    cancelled, first, second = asyncio.run(run())
    assert cancelled
    assert first != second
    assert is_gone(first)


def test_a_worker_that_died_while_idle_is_replaced_without_failing_a_call(rewards, make_config, answered, is_gone):
    judger = make_config(rewards.by_command).build()

    async def run():
        pid = int((await judger.judge(answered("pid"))).score)
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid)
        answer = await judger.judge(answered("fine"))
        await judger.close()
        return answer

    assert asyncio.run(run()) == Verdict(1.0)


def test_a_worker_is_replaced_after_its_number_of_calls(rewards, make_config, answered):
    judger = make_config(rewards.by_command, max_calls_per_worker=2).build()

    async def run():
        pids = [(await judger.judge(answered("pid"))).score for _ in range(4)]
        await judger.close()
        return pids

    a, b, c, d = asyncio.run(run())
    assert a == b != c == d


def test_a_call_that_eats_memory_is_ended(rewards, make_config, answered):
    judger = make_config(rewards.by_command, max_worker_memory=200 << 20, timeout_s=60).build()

    async def run():
        answers = [await judger.judge(answered("eat memory")), await judger.judge(answered("fine"))]
        await judger.close()
        return answers

    eaten, fine = asyncio.run(run())
    assert "at most 200 are allowed" in eaten.reason
    assert fine == Verdict(1.0)


def test_a_worker_that_leaked_is_replaced_after_the_call(rewards, make_config, answered):
    judger = make_config(rewards.by_command, max_worker_memory=150 << 20).build()

    async def run():
        first = await judger.judge(answered("pid"))
        await judger.judge(answered("leak"))  # judged, or ended in the act: on a slow machine the watch sees it first
        second = await judger.judge(answered("pid"))
        await judger.close()
        return first, second

    first, second = asyncio.run(run())
    assert isinstance(second, Verdict)
    assert first != second


def test_a_module_that_cannot_be_loaded_is_a_reason(make_config, answered, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def reward(response, label, extra_info):\n    return 1.0\n")
    judger = make_config(f"{file}:reward").build()
    file.write_text("raise RuntimeError('not today')\n")
    answer = asyncio.run(judger.judge(answered("a")))
    asyncio.run(judger.close())
    assert answer.reason == "the worker could not load the function: raised RuntimeError: not today"
    assert f'{file}", line 1' in answer.detail


def test_a_module_that_hangs_while_it_is_imported_has_a_deadline(make_config, answered, tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("def reward(response, label, extra_info):\n    return 1.0\n")
    judger = make_config(f"{file}:reward", start_timeout_s=0.3).build()
    file.write_text("import time\ntime.sleep(3600)\n")
    answer = asyncio.run(judger.judge(answered("a")))
    asyncio.run(judger.close())
    assert answer == Unjudged("the worker was not ready within 0.3 s")


def test_a_worker_imports_neither_torch_nor_the_configuration_code(rewards, make_config, answered):
    judger = make_config(rewards.by_command).build()
    answer = asyncio.run(judger.judge(answered("torch")))
    asyncio.run(judger.close())
    assert answer == Verdict(0.0)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.judger.rewards", {"numpy", "pydantic", "math_verify", "reasoning_gym", "torch"}),
        ("penstock.judger.composed", {"torch", "ray", "transformers", "math_verify", "reasoning_gym"}),
    ],
)
def test_imports_stay_light(module, absent):
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not absent & set(loaded.stdout.split())


DRIVER = """
import asyncio, pathlib, sys
import psutil
from penstock.judger import NativeJudgerConfig
from penstock.rollout import new_rollout

async def main():
    judger = NativeJudgerConfig(reward_handler=sys.argv[1] + ":by_command", num_workers=2, timeout_s=600).build()
    hangs = pathlib.Path(sys.argv[2])
    rollouts = [new_rollout("q", ground_truth=str(hangs)) for _ in range(2)]
    rollouts[0].response_text, rollouts[1].response_text = "hang and tell", "fine"
    busy = asyncio.create_task(judger.judge(rollouts[0]))
    await judger.judge(rollouts[1])
    while not hangs.exists():
        await asyncio.sleep(0.01)
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    if sys.argv[3] == "stay":
        await busy

asyncio.run(main())
"""


@pytest.fixture
def driver_command(tmp_path):
    return [sys.executable, "-W", "error", "-c", DRIVER, str(REWARDS), str(tmp_path / "hangs")]


def test_workers_end_when_their_parent_is_killed(driver_command, is_gone):
    with subprocess.Popen([*driver_command, "stay"], stdout=subprocess.PIPE, text=True) as driver:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        driver.kill()
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)


CHILD_DRIVER = """
import asyncio, sys
from penstock.judger import NativeJudgerConfig
from penstock.rollout import new_rollout

rollout = new_rollout("q", ground_truth=sys.argv[2])
rollout.response_text = "hang with a child"
judger = NativeJudgerConfig(reward_handler=sys.argv[1] + ":by_command", num_workers=1, timeout_s=600).build()
asyncio.run(judger.judge(rollout))
"""


def test_what_the_function_started_ends_when_the_driver_is_killed(is_gone, tmp_path):
    written = tmp_path / "child"
    command = [sys.executable, "-c", CHILD_DRIVER, str(REWARDS), str(written)]
    with subprocess.Popen(command) as driver:
        until = time.monotonic() + 60
        while not (written.exists() and written.read_text()):
            assert time.monotonic() < until
            time.sleep(0.01)
        driver.kill()
    assert is_gone(int(written.read_text()))


def test_a_worker_s_guard_ends_with_its_worker_and_is_no_child_of_it(rewards, make_config, answered, is_gone):
    judger = make_config(rewards.by_command).build()

    async def run():
        pid = int((await judger.judge(answered("pid"))).score)
        members = [other for other in processes_of_group(pid) if other != pid]
        children = await judger.judge(answered("wait for children"))
        await judger.close()
        return members, children

    (guard,), children = asyncio.run(run())
    assert children == Verdict(0.0)
    assert is_gone(guard)


def processes_of_group(group):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                    found.append(int(entry.name))
    return found


def test_workers_end_when_their_parent_forgets_to_close(driver_command, is_gone):
    done = subprocess.run([*driver_command, "leave"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""
    assert all(is_gone(int(pid)) for pid in done.stdout.split())


CLOSED_DRIVER = """
import asyncio, sys
from pathlib import Path
from penstock.judger import NativeJudgerConfig
from penstock.rollout import new_rollout

judger = NativeJudgerConfig(reward_handler=sys.argv[1] + ":length", num_workers=1).build()
rollout = new_rollout("q")
rollout.response_text = "four"
answer = asyncio.run(judger.judge(rollout))
asyncio.run(judger.close())
Path(sys.argv[2]).write_text(str(answer))
"""


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_workers_judge_for_a_process_without_standard_error(closed, tmp_path):
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", CLOSED_DRIVER, str(REWARDS)]
    subprocess.run([*command, str(tmp_path / "answer")], timeout=60, check=True)
    assert (tmp_path / "answer").read_text() == str(Verdict(4.0))
