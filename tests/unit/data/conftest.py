from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout import Group, Status


class CharTokenizer:
    """One token a character; a role is one token."""

    stop_ids = frozenset({0})
    vocab_size = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        ids = [1] * len(tools)
        for message in messages:
            if message["role"] == "tool":
                raise ValueError("roles must be system, user or assistant")
            ids += [2, *self.encode(message["content"])]
        return ids


class WaitingList:
    """The replay buffer as the sampler sees it."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, Status], list[Group]] = {}
        self.drawn: list[tuple[str, int]] = []
        self.disk_full = False

    def get(self, n: int, task: str, status: Status) -> list[Group]:
        groups = self.groups.get((task, status), [])
        taken, groups[:] = groups[:n], groups[n:]
        return taken

    def draw(self, group: Group, cursor: int) -> None:
        if self.disk_full:
            raise OSError("no space left on device")
        self.drawn.append((group[0].group_id, cursor))


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture
def new_waiting() -> type[WaitingList]:
    return WaitingList


@pytest.fixture
def good_row() -> Callable[..., dict[str, Any]]:
    def row(**changes: Any) -> dict[str, Any]:
        whole = {
            "prompt": "What is 1 + 1?",
            "reward_model": {"ground_truth": "2"},
            "data_source": "sums",
            "extra_info": {"index": 0},
        } | changes
        return {key: value for key, value in whole.items() if value is not ...}

    return row


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any, end: bytes = b"\n") -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(
            b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + end for line in lines)
        )
        return path

    return write
