"""A program that answers a sum with the help of a calculator. It knows OpenAI's API, and nothing of Penstock.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python _cli_agent.py "12+34=?"
"""

import json
import os
import re
import sys
import urllib.request
from typing import Any

CALCULATOR = {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}


def ask(messages: list[Any]) -> Any:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(
            {"model": "any", "messages": messages, "tools": [{"type": "function", "function": CALCULATOR}]}
        ).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def calculate(arguments: str) -> str:
    numbers = re.fullmatch(r"(\d+)\+(\d+)", str(json.loads(arguments).get("expression")))
    return str(int(numbers[1]) + int(numbers[2])) if numbers else "?"


messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    message = ask(messages)
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        result = calculate(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(message["content"] or "")
