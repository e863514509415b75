"""A rollout played by an agent outside: a function, a program, a service; and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_families import tokenizer_of
from session_clients import Spoken, user

from penstock.agent_loop.endpoint import EndpointAgentLoop, EndpointAgentLoopConfig
from penstock.agent_loop.session.agents import as_report
from penstock.errors import ConfigError, DataFailure, EngineUnavailable, InfrastructureFailure
from penstock.ports import Completion, GenerateRequest
from penstock.rollout import (
    FailureReason,
    FinishReason,
    Group,
    Prompt,
    RolloutState,
    SampleParams,
    Status,
    Verdict,
    pack_ids,
)
from penstock.testing import EngineFaults, JudgerScript, ScriptedJudger

TOKENIZER = tokenizer_of("qwen2.5")


def loop_of(*texts: str, judger: bool = True, **options: Any) -> EndpointAgentLoop:
    script = {name: options.pop(name) for name in ("faults", "latency_s", "tokens_per_s") if name in options}
    return EndpointAgentLoop(
        engine=options.pop("engine", None) or Spoken(TOKENIZER, texts, end="<|im_end|>", **script),
        tokenizer=TOKENIZER,
        judger=ScriptedJudger(JudgerScript()) if judger else None,
        sample_params=SampleParams(max_tokens=100),
        **options,
    )


def group_of(k: int = 1) -> Group:
    ids = pack_ids(TOKENIZER.render([user("hello")]))
    prompt = Prompt(messages=(user("hello"),), ids=ids, ground_truth="secret", extra_info={"level": 3})
    return [RolloutState(prompt=prompt, task_name="t", group_id="t:0", rollout_id=f"t:0:{i}") for i in range(k)]


def play(loop: EndpointAgentLoop, group: Group | None = None) -> Group:
    async def main() -> Group:
        try:
            return await loop.generate_group(group or group_of(), enable_partial_rollout=True)
        finally:
            await loop.close()

    return asyncio.run(main())


# Agents: they know how to ask an API, and nothing else.


async def ask(base_url: str, api_key: str, *messages: dict[str, Any]) -> str:
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=20) as client:
        answer = await client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": messages})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


async def two_turns(prompt: str, base_url: str, api_key: str) -> None:
    first = await ask(base_url, api_key, user(prompt))
    await ask(base_url, api_key, user(prompt), {"role": "assistant", "content": first}, user("and?"))


def blocking(messages: Any, base_url: str, api_key: str) -> str:
    headers = {"x-api-key": api_key}
    answer = httpx.post(
        f"{base_url}/chat/completions", json={"model": "m", "messages": list(messages)}, headers=headers, timeout=20
    )
    return "final: " + answer.json()["choices"][0]["message"]["content"]


async def rewards_itself(base_url: str, api_key: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    text = await ask(base_url, api_key, user("hello"))
    return {"answer": text, "reward": 0.5, "level": extra_info["level"]}


async def silent() -> str:
    return "I know it all"


async def fails(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, user("hello"))
    raise KeyError("a bug of the agent's")


async def hangs(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, user("hello"))
    await asyncio.Event().wait()


released = threading.Event()


def hangs_in_a_thread(base_url: str, api_key: str) -> None:
    released.wait(60)


async def never_ends(base_url: str, api_key: str) -> None:
    while True:
        await ask(base_url, api_key, user("hello"))


def test_an_async_function_is_played_and_judged_by_its_last_answer() -> None:
    (rollout,) = play(loop_of("one", "two", agent=two_turns))
    assert (rollout.status, rollout.finish_reason) == (Status.COMPLETED, FinishReason.STOP)
    assert rollout.response_text == "two"
    assert [turn.kind for turn in rollout.turns] == ["generate", "message", "generate"]
    assert len(rollout.segments) == 1 and rollout.reward is not None


def test_a_plain_function_has_a_thread_of_its_own_and_may_say_what_its_answer_is() -> None:
    group = play(loop_of("one", "two", "three", agent=blocking), group_of(3))
    assert {rollout.status for rollout in group} == {Status.COMPLETED}
    assert sorted(rollout.response_text for rollout in group) == ["final: one", "final: three", "final: two"]


def test_an_agent_may_report_its_own_reward() -> None:
    (rollout,) = play(loop_of("one", agent=rewards_itself, judger=False))
    assert rollout.reward == Verdict(0.5, {"level": 3.0})
    (rollout,) = play(loop_of("one", "two", agent=two_turns, judger=False))
    assert rollout.status is Status.FAILED and rollout.error is not None
    assert "reported no reward" in rollout.error.message


@pytest.mark.parametrize(
    ("value", "answer", "score"),
    [
        (None, "", None),
        ("x", "x", None),
        (1, "", 1.0),
        (True, "", 1.0),
        ({"answer": "x"}, "x", None),
        ({"reward": 0.5, "answer": "x", "speed": 2}, "x", 0.5),
        ({"score": 0.25}, "", 0.25),
    ],
)
def test_what_an_agent_reports_is_an_answer_a_reward_or_both(value: Any, answer: str, score: float | None) -> None:
    report = as_report(value, "a")
    assert report.answer == answer
    assert (report.verdict.score if report.verdict is not None else None) == score


@pytest.mark.parametrize("value", [float("nan"), {"reward": "much"}, {"reward": None}, [1], {"answer": 5, "reward": 1}])
def test_what_is_neither_is_refused_and_never_a_number(value: Any) -> None:
    with pytest.raises(DataFailure):
        as_report(value, "a")


def test_an_agent_that_fails_fails_its_rollout_with_its_own_words() -> None:
    (rollout,) = play(loop_of("one", agent=fails))
    assert rollout.error is not None
    assert (rollout.error.reason, rollout.error.infrastructure) == ("agent_loop_error", False)
    assert "raised KeyError" in rollout.error.message and "test_endpoint_loop.py" in rollout.error.message


def test_an_agent_that_asks_nothing_made_no_answer() -> None:
    (rollout,) = play(loop_of(agent=silent))
    assert rollout.error is not None and rollout.error.reason == "empty_answer"


def test_an_agent_that_fails_because_the_engine_did_is_not_to_blame() -> None:
    (rollout,) = play(loop_of("one", agent=fails, faults=EngineFaults(fails=1.0)))
    assert rollout.error is not None
    assert (rollout.error.reason, rollout.error.infrastructure) == ("engine_error", True)


async def makes_the_best_of_it(base_url: str, api_key: str) -> str:
    try:
        return await ask(base_url, api_key, user("hello"))
    except httpx.HTTPError:
        return "I do not know."


def test_an_agent_that_goes_on_without_an_answer_of_the_engine_is_not_judged() -> None:
    (rollout,) = play(loop_of("one", agent=makes_the_best_of_it, faults=EngineFaults(fails=1.0)))
    assert rollout.error is not None
    assert (rollout.error.reason, rollout.error.infrastructure) == ("engine_error", True)


class Deaf(Spoken):
    """Answers once."""

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.asked:
            raise InfrastructureFailure("it broke", reason=FailureReason.ENGINE_ERROR)
        return await super().generate(request)


async def asks_on(base_url: str, api_key: str) -> str:
    one = await ask(base_url, api_key, user("hello"))
    with contextlib.suppress(httpx.HTTPError):
        await ask(base_url, api_key, user("hello"), {"role": "assistant", "content": one}, user("more"))
    return "I do not know."


def test_a_conversation_that_the_engine_broke_off_is_not_judged_by_its_beginning() -> None:
    (rollout,) = play(loop_of(agent=asks_on, engine=Deaf(TOKENIZER, ["one"], end="<|im_end|>")))
    assert rollout.error is not None and rollout.error.infrastructure


class Dead(Spoken):
    async def generate(self, request: GenerateRequest) -> Completion:
        raise EngineUnavailable("none is left")


async def stubborn(base_url: str, api_key: str) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):
            await ask(base_url, api_key, user("hello"))


def test_what_ends_the_run_ends_it_whatever_the_agent_makes_of_it() -> None:
    with pytest.raises(EngineUnavailable, match="none is left"):
        play(loop_of(agent=stubborn, engine=Dead(TOKENIZER, [], end="")))


def test_an_agent_that_reaches_a_limit_is_judged_by_what_it_has() -> None:
    (rollout,) = play(loop_of("one", "two", agent=never_ends, max_turns=2))
    assert (rollout.status, rollout.finish_reason) == (Status.COMPLETED, FinishReason.LENGTH)
    assert len(rollout.segments) == 2


# Deadlines.


def test_two_hundred_sessions_that_never_finish_are_ended_by_their_deadline() -> None:
    loop = loop_of(*["one"] * 200, agent=hangs, rollout_timeout_s=3.0)
    group = play(loop, group_of(200))
    assert {rollout.error.reason for rollout in group if rollout.error is not None} == {"rollout_deadline"}
    assert {rollout.status for rollout in group} == {Status.FAILED}
    assert loop._server is not None and len(loop._server) == 0
    assert loop.num_abandoned == 0


def test_a_thread_that_hangs_is_left_behind() -> None:
    released.clear()
    try:
        (rollout,) = play(loop_of(agent=hangs_in_a_thread, rollout_timeout_s=0.3))
        assert rollout.error is not None and rollout.error.reason == "rollout_deadline"
    finally:
        released.set()


# Programs.

PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"model": "m", "messages": task["messages"]}).encode()
request = urllib.request.Request(url + "/chat/completions", body, {"authorization": "Bearer " + key})
ours = sum("PENSTOCK" in name for name in os.environ)
print("asking")
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"answer": sys.argv[1] + " " + text, "reward": 1, "given": len(task), "ours": ours}))
"""


def test_a_program_gets_its_task_a_base_url_and_a_key_and_nothing_else_of_ours(monkeypatch: Any) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", "/somewhere")
    monkeypatch.setenv("OPENAI_ORGANIZATION", "somebody")
    (rollout,) = play(loop_of("one", command=[sys.executable, "-c", PROGRAM, "{prompt}?"], judger=False))
    assert rollout.response_text == "hello? one"
    assert rollout.reward == Verdict(1.0, {"given": 4.0, "ours": 0.0})


def test_a_program_that_fails_says_why() -> None:
    code = "import sys; print('no luck today', file=sys.stderr); sys.exit(3)"
    (rollout,) = play(loop_of(command=[sys.executable, "-c", code]))
    assert rollout.error is not None
    assert "exit code 3: no luck today" in rollout.error.message


def test_a_program_that_prints_no_json_has_printed_its_answer() -> None:
    code = PROGRAM.rpartition("print(")[0] + "print('it is', text)"
    (rollout,) = play(loop_of("one", command=[sys.executable, "-c", code]))
    assert rollout.response_text == "asking\nit is one"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_a_program_and_what_it_started_end_at_the_deadline(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(100)"
    )
    (rollout,) = play(loop_of(command=[sys.executable, "-c", code], rollout_timeout_s=2.0))
    assert rollout.error is not None and rollout.error.reason == "rollout_deadline"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert eventually(lambda: all(map(gone, pids)))


def test_a_program_dies_with_the_run_that_started_it(tmp_path: Path) -> None:
    launch = Path(sys.modules["penstock.agent_loop.session.launch"].__file__ or "")
    agent = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    driver = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, {str(launch)!r}, str(os.getpid()), sys.executable, '-c', {agent!r}])\n"
        "time.sleep(100)"
    )

    async def main() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", driver)
        assert await asyncio.to_thread(
            eventually, lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()
        )
        process.send_signal(signal.SIGKILL)
        await process.wait()
        return int((tmp_path / "pid").read_text())

    pid = asyncio.run(main())
    assert eventually(lambda: gone(pid))


# Services.


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        task = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = blocking(task["messages"], task["base_url"], task["api_key"])
        body = json.dumps({"answer": text, "reward": 2.0} if self.path == "/play" else {"reward": "x"}).encode()
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "said"),
    [("/play", ""), ("/nonsense", "a score must be a number"), ("/broken", "answered 500")],
)
def test_a_service_is_posted_the_task(service: str, path: str, said: str) -> None:
    (rollout,) = play(loop_of("one", url=service + path, judger=False))
    if said:
        assert rollout.error is not None and said in rollout.error.message
        assert rollout.error.infrastructure == (path == "/broken")
    else:
        assert (rollout.response_text, rollout.reward) == ("final: one", Verdict(2.0))


def test_a_service_that_is_not_there_is_tried_again() -> None:
    (rollout,) = play(loop_of(url="http://127.0.0.1:9"))
    assert rollout.error is not None and rollout.error.infrastructure


# Configuration.


async def needs_more(base_url: str, api_key: str, weather: str) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "exactly one of agent, command and url must be given; none is"),
        ({"agent": silent, "url": "http://x"}, "agent and url is"),
        ({"agent": needs_more}, "needs ['weather']"),
        ({"agent": "no.such.module"}, "cannot be imported"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"url": "ftp://x"}, "must begin with http"),
        ({"agent": silent, "tool_parser": "hermse"}, "hermse"),
        ({"agent": silent, "arguments": {"matches": 1}}, "matches"),
    ],
)
def test_an_agent_that_cannot_work_is_refused_when_the_configuration_is_checked(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match="(?s)" + said.replace("[", r"\[")):
        EndpointAgentLoopConfig(**options).check()


def test_every_option_reaches_the_loop() -> None:
    config = EndpointAgentLoopConfig(
        agent=two_turns, match="exact", max_turns=3, max_session_tokens=9, tool_parser=None
    )
    config.check()
    loop = config.build(engine=Spoken(TOKENIZER, [], end=""), tokenizer=TOKENIZER, judger=None, context=50)
    assert isinstance(loop, EndpointAgentLoop)
    assert (loop._rules.strictness, loop._rules.max_turns, loop._rules.max_tokens, loop._rules.context) == (
        *("exact", 3, 9, 50),
    )
    assert not loop.replayable and config.sets_reward
    assert loop._asked.on_pause == "keep"
