"""What every source of prompts has in common: the interface, the checks, and the set of prompts that comes out.

A source hands its rows to a `PromptScan`, one by one. The scan renders each prompt with the model's chat template,
checks it, and keeps going after a bad row, so that one `DatasetError` names every problem.

Of a very long source only the first `RENDERED_FIRST` prompts are all rendered by the scan. After them a prompt is
rendered when it is drawn, if its roles were rendered before and its bytes alone say that it is short enough.
"""

from __future__ import annotations

import abc
import array
import bisect
import collections
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, overload, runtime_checkable

import msgspec

from penstock.config import Config, nearest
from penstock.errors import DatasetError
from penstock.ports import Tokenizer
from penstock.rollout import Prompt, pack_ids

HASH_BYTES = 8

LISTED_PROBLEMS = 50
"""How many problems an error spells out; the rest is counted by kind."""


ROWS_AT_ONCE = 512
"""Prompts that are rendered together; a tokenizer that can spreads them over the cores."""

RENDERED_FIRST = 10_000

OnProgress = Callable[[int], None]
"""Told now and then how many rows were read."""


@runtime_checkable
class RendersMany(Protocol):
    """A tokenizer that renders several conversations without tools faster than one by one."""

    def render_many(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        """As `render` for each. Raises when one of them cannot be rendered, whichever."""
        ...


class Problem(NamedTuple):
    kind: str
    """A few words, the same for every row with this problem; what is not listed is counted under it."""
    text: str


class Place(NamedTuple):
    """Where a row stands; shown as `file:line`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one source, ready to be drawn."""

    prompts: Sequence[Prompt]
    dropped: int = 0
    """Over-long prompts left out because the configuration asked for it."""
    quarantined: int = 0
    """Bad rows set aside because the configuration asked for it."""
    problems: tuple[str, ...] = ()
    """What was wrong with the quarantined rows, as `file:line: problem`."""
    lines: Sequence[int] = ()
    """The line of each prompt in its file; empty where there is none."""
    files: tuple[tuple[int, str], ...] = ()
    """Which prompts are of which file: the index of its first one, and its name."""

    def __len__(self) -> int:
        return len(self.prompts)

    def place(self, index: int) -> str:
        """`file:line` of a prompt, or its number where it has none."""
        if not self.lines:
            return f"prompt {index + 1}"
        _, file = self.files[bisect.bisect(self.files, index, key=lambda found: found[0]) - 1]
        return f"{file}:{self.lines[index]}"

    @property
    def unrendered(self) -> Sequence[Prompt]:
        """The prompts for those who do not ask for their ids."""
        return self.prompts.waiting if isinstance(self.prompts, RenderedWhenDrawn) else self.prompts

    def row_hashes(self) -> bytes:
        """Eight bytes for each prompt: of its messages, ground truth, data source, tools and extra information."""
        encode = msgspec.msgpack.Encoder(order="deterministic").encode
        hashes = bytearray()
        for prompt in self.unrendered:
            said = prompt.messages or prompt.ids
            row = (said, prompt.ground_truth, prompt.data_source, prompt.tools, prompt.extra_info)
            hashes += hashlib.blake2b(encode(row), digest_size=HASH_BYTES).digest()
        return bytes(hashes)

    def rendering_hash(self) -> bytes:
        """Of the ids of some prompts: another chat template or tokenizer changes it."""
        ids = hashlib.blake2b(digest_size=HASH_BYTES)
        for index in range(0, len(self), max(1, len(self) // 32)):
            ids.update(self.prompts[index].ids)
        return ids.digest()


class RenderedWhenDrawn(Sequence[Prompt]):
    """Prompts of which some get their ids when they are asked for."""

    def __init__(self, waiting: Sequence[Prompt], tokenizer: Tokenizer) -> None:
        self.waiting = waiting
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.waiting)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        found = self.waiting[index]
        return self._rendered(found) if isinstance(found, Prompt) else [self._rendered(prompt) for prompt in found]

    def _rendered(self, prompt: Prompt) -> Prompt:
        if prompt.ids:
            return prompt
        try:
            ids = self._tokenizer.render(prompt.messages, prompt.tools)
        except Exception as error:  # a template may raise anything
            shown = repr(prompt.messages)[:200]
            raise DatasetError(f"the chat template refuses the prompt {shown}: {error}") from error
        return msgspec.structs.replace(prompt, ids=pack_ids(ids))


class PromptSourceConfig(Config):
    """Where prompts come from: a dataset file or a generator."""

    @abc.abstractmethod
    def load(
        self,
        tokenizer: Tokenizer,
        *,
        context: int | None,
        max_tokens: int,
        data_sources: frozenset[str] | None,
        on_progress: OnProgress | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PromptSet:
        """Every prompt, rendered and checked. Raises one DatasetError with all problems of all rows.

        `context` is the model's limit for prompt and answer together, `max_tokens` the answer's budget,
        `data_sources` the names that the judger has a branch for; None checks nothing. `on_progress` is told how many
        rows were read. `tools` are for the prompts of rows that name none.
        """


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt must keep to."""

    max_tokens: int
    context: int | None = None
    data_sources: frozenset[str] | None = None
    max_prompt_tokens: int | None = None
    drop_over_long: bool = False
    quarantine: int = 0
    """How many bad rows may be set aside."""
    tools: tuple[dict[str, Any], ...] = ()
    """Of prompts that name none."""


class PromptScan:
    """Collects prompts and problems; `finish` gives the prompts or raises the problems."""

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, *, source: str, on_progress: OnProgress | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._source = source
        self._on_progress = on_progress
        self._rows = 0
        self._batches = tokenizer if isinstance(tokenizer, RendersMany) else None
        self._sizes: dict[tuple[Any, ...], int] = {}
        """Tokens of the first prompt with these roles that was rendered."""
        self._pending: list[tuple[Place, Prompt | None, list[Problem]]] = []
        self._prompts: list[Prompt] = []
        self._lines = array.array("q")
        self._files: list[tuple[int, str]] = []
        self._dropped = 0
        self._bad_rows = 0
        self._unread = False
        self._listed: list[str] = []
        self._kinds: collections.Counter[str] = collections.Counter()
        self._tools: dict[bytes, tuple[dict[str, Any], ...]] = {}
        self._names: dict[str, str] = {}

    def add(self, where: Place, prompt: Prompt, problems: Sequence[Problem] = ()) -> None:
        """Check and render one prompt. `problems` is what its row is already blamed for."""
        if self._limits.tools and not prompt.tools and not prompt.ids:
            prompt = msgspec.structs.replace(prompt, tools=self._limits.tools)
        stored = _as_stored(prompt)
        if isinstance(stored, Problem):
            self.refuse(where, [*problems, stored])
        else:
            self._take(where, stored, [*problems, *_text_problems(stored)])

    def refuse(self, where: Place, problems: Sequence[Problem]) -> None:
        """Note a row that cannot be used, with everything that is wrong with it."""
        self._take(where, None, list(problems))

    def _take(self, where: Place, prompt: Prompt | None, problems: list[Problem]) -> None:
        self._pending.append((where, prompt, problems))
        if len(self._pending) >= ROWS_AT_ONCE:
            self._work_off()

    def _work_off(self) -> None:
        """Render and check what came in, in that order."""
        pending, self._pending = self._pending, []
        may_wait = len(self._prompts) >= RENDERED_FIRST and self._batches is not None
        waits = [may_wait and not problems and self._may_wait(prompt) for _, prompt, problems in pending]
        rendered = self._render_together([row[1] for row, wait in zip(pending, waits, strict=True) if not wait])
        for (where, prompt, problems), wait in zip(pending, waits, strict=True):
            if prompt is None:
                self._set_aside(where, problems)
            elif wait:
                self._keep(where, prompt, b"")
            else:
                self._check(where, prompt, problems, rendered.get(id(prompt)))
        self._rows += len(pending)
        if self._on_progress is not None:
            self._on_progress(self._rows)

    def _render_together(self, prompts: Sequence[Prompt | None]) -> dict[int, list[int]]:
        """Ids by the prompt's identity, of those that can be rendered together; none when one of them cannot be."""
        plain = [prompt for prompt in prompts if prompt and prompt.messages and not prompt.ids and not prompt.tools]
        if not plain or self._batches is None:
            return {}
        try:
            ids = self._batches.render_many([prompt.messages for prompt in plain])
        except Exception:  # one by one then, so that what a template raises is found with its row
            return {}
        return {id(prompt): found for prompt, found in zip(plain, ids, strict=True)}

    def _may_wait(self, prompt: Prompt | None) -> bool:
        """Whether it is known without rendering that nothing is wrong with it.

        No token is shorter than a byte, and what the template adds is less than all of an earlier prompt.
        """
        if prompt is None or prompt.ids or prompt.tools or not self._has_branch(prompt):
            return False
        most = self._sizes.get(_roles(prompt))
        if most is None:
            return False
        said = 0
        for message in prompt.messages:
            content = message.get("content")
            if not isinstance(content, str) or len(message) != 2:
                return False
            said += len(content.encode())
        return said > 0 and not self._length_problems(most + said)

    def _has_branch(self, prompt: Prompt) -> bool:
        return self._limits.data_sources is None or prompt.data_source in self._limits.data_sources

    def _keep(self, where: Place, prompt: Prompt, ids: bytes) -> None:
        if not self._files or self._files[-1][1] != where.file:
            self._files.append((len(self._prompts), where.file))
        self._lines.append(where.line)
        self._prompts.append(self._compact(prompt, ids))

    def _set_aside(self, where: Place, problems: Sequence[Problem]) -> None:
        self._bad_rows += 1
        for kind, text in problems:
            self._kinds[kind] += 1
            # Bounded, however bad the file is; rows that may be quarantined are listed in full.
            if len(self._listed) < LISTED_PROBLEMS or self._bad_rows <= self._limits.quarantine:
                self._listed.append(f"{where}: {text}")

    def give_up(self, where: Place, problem: Problem) -> None:
        """Note that the source cannot be read from here on. No quarantine covers rows that nobody saw."""
        self._work_off()
        self._unread = True
        self._kinds[problem.kind] += 1
        self._listed.insert(0, f"{where}: {problem.text}")

    def finish(self) -> PromptSet:
        self._work_off()
        if self._unread or self._bad_rows > self._limits.quarantine:
            raise DatasetError(self._report())
        if not self._prompts:
            reason = f"{self._dropped} dropped as over-long, {self._bad_rows} quarantined"
            raise DatasetError(f"{self._source}: no prompt is left ({reason})")
        prompts: Sequence[Prompt] = self._prompts
        if self._batches is not None and len(self._prompts) > RENDERED_FIRST:
            prompts = RenderedWhenDrawn(self._prompts, self._tokenizer)
        return PromptSet(prompts, self._dropped, self._bad_rows, tuple(self._listed), self._lines, tuple(self._files))

    def _check(self, where: Place, prompt: Prompt, problems: list[Problem], rendered: list[int] | None) -> None:
        limits = self._limits
        if not self._has_branch(prompt):
            hint = nearest(prompt.data_source, list(limits.data_sources or ()))
            text = f"data_source {prompt.data_source!r} has no judger branch.{hint}"
            problems.append(Problem("data_source without a judger branch", text))
        ids = self._render(prompt, problems, rendered)
        too_long = self._length_problems(len(ids) // 4)
        if too_long and not problems and limits.drop_over_long:
            self._dropped += 1
            return
        problems += too_long
        if problems:
            self._set_aside(where, problems)
        else:
            if not prompt.ids and not prompt.tools:
                self._sizes.setdefault(_roles(prompt), len(ids) // 4)
            self._keep(where, prompt, ids)

    def _report(self) -> list[str]:
        listed = self._listed[:LISTED_PROBLEMS]
        hidden = sum(self._kinds.values()) - len(listed)
        if hidden:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
            listed.append(f"{self._source}: and {hidden} more problems; in all: {kinds}")
        if self._limits.quarantine and not self._unread:
            cap = f"{self._bad_rows} bad rows; quarantine allows {self._limits.quarantine}"
            listed.append(f"{self._source}: {cap}")
        return listed

    def _render(self, prompt: Prompt, problems: list[Problem], rendered: list[int] | None) -> bytes:
        if prompt.ids or not prompt.messages:
            return prompt.ids
        try:
            ids = self._tokenizer.render(prompt.messages, prompt.tools) if rendered is None else rendered
        except Exception as error:  # whatever a chat template raises belongs to the row it was given
            problems.append(Problem("refused by the chat template", f"the chat template refuses it: {error}"))
            return b""
        if not ids:
            problems.append(Problem("empty prompt", "the prompt has no tokens"))
        return pack_ids(ids)

    def _length_problems(self, n: int) -> list[Problem]:
        limits, found = self._limits, []
        if limits.max_prompt_tokens is not None and n > limits.max_prompt_tokens:
            text = f"the prompt has {n} tokens; max_prompt_tokens is {limits.max_prompt_tokens}"
            found.append(Problem("over-long prompt", text))
        if limits.context is not None and n + limits.max_tokens > limits.context:
            text = (
                f"the prompt has {n} tokens; with max_tokens {limits.max_tokens} "
                f"that exceeds the model's context of {limits.context}"
            )
            found.append(Problem("prompt and answer exceed the context", text))
        return found

    def _compact(self, prompt: Prompt, ids: bytes) -> Prompt:
        """The prompt with its ids; tools and names that repeat from row to row are stored once."""
        tools = self._tools.setdefault(msgspec.msgpack.encode(prompt.tools), prompt.tools) if prompt.tools else ()
        name = self._names.setdefault(prompt.data_source, prompt.data_source)
        return msgspec.structs.replace(prompt, ids=ids, tools=tools, data_source=name)


def _roles(prompt: Prompt) -> tuple[Any, ...]:
    return tuple([message.get("role") for message in prompt.messages])


def _as_stored(prompt: Prompt) -> Prompt | Problem:
    """The prompt as a ledger gives it back, so that judging does not depend on whether the run was restarted."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return Problem("cannot be stored", f"the prompt cannot be stored: {error}")


def _text_problems(prompt: Prompt) -> list[Problem]:
    problems: list[Problem] = []
    if not prompt.messages and not prompt.ids:
        problems.append(Problem("empty prompt", "the prompt has no messages"))
    if len(prompt.ids) % 4:
        problems.append(Problem("mistyped field", "prompt.ids is not packed int32; use penstock.rollout.pack_ids"))
    # A quick look first: only a text that may hold one is looked through.
    said = (prompt.messages, prompt.ground_truth, prompt.data_source)
    if b"u0000" in msgspec.json.encode(said) and any(_has_nul(value) for value in said):
        problems.append(Problem("NUL", "a text holds a NUL character"))
    return problems


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(_has_nul(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_has_nul(item) for item in value)
