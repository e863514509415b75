"""A taskset as users of verifiers write it: sums, an agent with a calculator, and what an answer is worth.

It runs in the environment of verifiers and knows nothing of Penstock.
"""

import sys
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

PROGRAM = """
import json, re, sys, time, urllib.request

base_url, key, prompt = sys.argv[1:]
parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "calculator", "parameters": parameters}}]
messages = [{"role": "user", "content": prompt}]
if prompt == "hang":
    time.sleep(600)
for _ in range(3):
    request = urllib.request.Request(
        base_url + "/chat/completions",
        json.dumps({"model": "m", "messages": messages, "tools": tools}).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        numbers = re.fullmatch(r"(\\d+)\\+(\\d+)", str(json.loads(call["function"]["arguments"]).get("expression")))
        result = str(int(numbers[1]) + int(numbers[2])) if numbers else "?"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
"""


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        if self.data.prompt == "unscored":
            raise RuntimeError("there is no answer to this")
        return 0.5 * (trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 200
    prompts: list[str] = []


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterator[SumsTask]:
        for prompt in self.config.prompts:
            yield SumsTask(SumsData(prompt=prompt, answer="4"), self.config.task)
        for number in range(self.config.num_tasks):
            a, b = number * 37 % 100, number * 53 % 97
            yield SumsTask(SumsData(prompt=f"{a}+{b}=?", answer=str(a + b)), self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *rest: Any, **more: Any
    ) -> Any:
        prompt = trace.task.data.prompt
        return await runtime.run_program([sys.executable, "-I", "-S", "-c", PROGRAM, endpoint, secret, prompt], {})


__all__ = ["SumsHarness", "SumsTaskset"]
