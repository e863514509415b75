"""A language model as the judge: it reads a template and must answer in a form that can be read without guessing.

    LLMJudger        rates one answer
    PairwiseJudger   compares the answers of a group two by two; a score is the share of comparisons won
    RankingJudger    orders the answers of a group; a score is the share of the others that are behind

An answer that has no score, two different ones, or one out of range is asked for again and then leaves the rollout
unjudged. What the judged model wrote is never read as the judge's word: only the judge's answer is parsed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import string
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.errors import ConfigError
from penstock.judger.asking import Asker, EndpointAsker, EngineAsker, seed_of
from penstock.judger.config import JudgerSet
from penstock.judger.contract import Answer, ContractJudger, Try
from penstock.judger.failure import CallFailed
from penstock.judger.handler import locate_handler
from penstock.judger.pattern import find_words
from penstock.judger.pool import PoolLimits, WorkerPool
from penstock.judger.service import ServiceConfig, url_problems
from penstock.ports import Engine, Judger, Local, Placement, Tokenizer
from penstock.rollout import Group, RolloutState, SampleParams, Unjudged, Verdict

MAX_ANSWER = 100_000
"""Characters of a judge's answer; a longer one is none."""
LONGEST_READING_S = 5.0
"""Of an answer by a pattern of one's own, or `timeout_s` where that is less."""
READERS = 2
"""Worker processes that read by such a pattern."""
SHOWN = 120
"""Characters of an answer in a reason."""
_COMMON = frozenset({"prompt", "label", "data_source"})


class LLMConfig(ServiceConfig):
    """What every language model that judges has."""

    base_url: str | None = None
    """Of an OpenAI-compatible endpoint, as in `http://127.0.0.1:8000/v1`. None: the engines of this run."""
    model: str = ""
    """As the endpoint names it."""
    system: str = ""
    """A system message, where it is not empty."""
    template: str
    """What the judge is asked, with placeholders in braces."""
    pattern: str
    """A regular expression with one group; one of your own is tried in worker processes, which are killed when it takes
    longer than 5 s."""
    sample_params: SampleParams = SampleParams(temperature=0.0, max_tokens=512)
    """How the judge answers."""
    extra_body: dict[str, Any] = {}
    """Fields of the request to the endpoint, added or replaced; None leaves one out."""

    @property
    def placeholders(self) -> frozenset[str]:
        raise NotImplementedError

    @property
    def asks_engine(self) -> bool:
        return self.base_url is None

    @property
    def actors_name(self) -> str:
        return f"judger {self.model or 'on the engines of the run'}"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.base_url is not None:
            yield from url_problems(self.base_url, "base_url")
            if self.base_url.rstrip("/").endswith("/chat/completions"):
                yield f"base_url is {self.base_url!r}; it ends before /chat/completions, which is added"
            if not self.model:
                yield "base_url is given and model is empty; an endpoint is asked for a model by name"
        elif foreign := sorted({"model", "api_key", "headers", "extra_body"} & self.model_fields_set):
            yield f"{' and '.join(foreign)} given without base_url; the engines of this run need none"
        if set_here := sorted({"messages", "stream", "n"} & set(self.extra_body)):
            yield f"extra_body has {' and '.join(set_here)}; the judge's question and one whole answer are not replaced"
        try:
            msgspec.json.encode(self.extra_body)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            yield f"extra_body cannot be sent as JSON: {error}"
        yield from _template_problems(self.template, self.placeholders)
        yield from _pattern_problems(self.pattern)

    def build(self, placement: Placement = Local()) -> Judger:  # noqa: B008 - it has no state
        """Raises ConfigError when it asks the engines of a run and is not built by one."""
        ports: tuple[str, ...] = ()
        if self.asks_engine:
            ports = ("engine", "tokenizer")
            if not isinstance(placement, JudgerSet) or not set(ports) <= set(placement.ports):
                raise ConfigError(
                    f"{type(self).__name__}.base_url is None: it asks the engines of a run, and there is no run here; "
                    "give base_url"
                )
        return self.placed(placement, self._kind(), ports=ports)

    def _kind(self) -> type[LLMBased]:
        raise NotImplementedError


class LLMJudgerConfig(LLMConfig):
    """A language model that rates one answer."""

    template: str = (
        "Rate the answer to the question below from 0 (useless or wrong) to 10 (right, complete and clear).\n\n"
        "[Question]\n{prompt}\n\n[Reference]\n{label}\n\n[Answer]\n{response}\n\n"
        "Think about it briefly, then end with the rating in double brackets, as in: Rating: [[5]]"
    )
    """With {response}, and if wanted {prompt}, {label} and {data_source}."""
    pattern: str = r"\[\[(-?\d+(?:\.\d+)?)\]\]"
    """Finds the score in the judge's answer: a regular expression with one group. All it finds must agree."""
    choices: dict[str, float] = {}
    """What the words that the pattern finds are worth, where they are no numbers: {"correct": 1, "incorrect": 0}."""
    min_score: float = 0.0
    """A lower one is no score."""
    max_score: float = 10.0
    """A higher one is no score."""

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset({"response"})

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.min_score >= self.max_score:
            yield f"min_score is {self.min_score:g}; it must be below max_score, which is {self.max_score:g}"
        if "pattern" not in self.model_fields_set:
            yield from _word_problems(self.choices, self.pattern, "choices")
        for word, score in self.choices.items():
            if not self.min_score <= score <= self.max_score:
                yield f"choices[{word!r}] is {score:g}, outside of min_score and max_score"

    def _kind(self) -> type[LLMBased]:
        return LLMJudger


class PairwiseJudgerConfig(LLMConfig):
    """A language model that compares the answers of a group, two at a time."""

    template: str = (
        "Which of the two answers to the question below is better?\n\n"
        "[Question]\n{prompt}\n\n[Answer A]\n{first}\n\n[Answer B]\n{second}\n\n"
        "Think about it briefly, then end with [[A]], [[B]], or [[C]] if they are equally good."
    )
    """With {first} and {second}, and if wanted {prompt}, {label} and {data_source}."""
    pattern: str = r"\[\[([ABC])\]\]"
    """Finds the word in the judge's answer: a regular expression with one group. All it finds must agree."""
    words: tuple[str, str, str] = ("A", "B", "C")
    """What stands for the first, for the second, and for neither."""
    both_orders: bool = True
    """Ask every pair twice, each answer first once: judges favour a place."""

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset({"first", "second"})

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if len(set(self.words)) != 3:
            yield f"words is {self.words}; they must differ"
        if "pattern" not in self.model_fields_set:
            yield from _word_problems(self.words, self.pattern, "words")

    def _kind(self) -> type[LLMBased]:
        return PairwiseJudger


class RankingJudgerConfig(LLMConfig):
    """A language model that orders all answers of a group at once."""

    template: str = (
        "Order the {count} answers to the question below from best to worst.\n\n"
        "[Question]\n{prompt}\n\n{answers}\n\n"
        "Think about it briefly, then end with all numbers in one line, best first, as in: Ranking: [[2, 1, 3]]"
    )
    """With {answers}, which are numbered from 1, and if wanted {count}, {prompt}, {label} and {data_source}."""
    pattern: str = r"\[\[([\d\s,>]+)\]\]"
    """Finds the order in the judge's answer: a regular expression with one group. All it finds must agree."""

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset({"answers"})

    def _kind(self) -> type[LLMBased]:
        return RankingJudger


class LLMBased(ContractJudger):
    """Fills the template in and asks; subclasses read the answer."""

    def __init__(self, config: LLMConfig, engine: Engine | None = None, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(f"{config.model or 'the engines of the run'} as a judge", config)
        self._config = config
        self._asker: Asker
        if config.base_url is not None:
            self._asker = EndpointAsker(config.base_url, config.model, config.sample_params, config.extra_body, config)
        else:
            assert engine is not None and tokenizer is not None, "`LLMConfig.build` sees to it"
            self._asker = EngineAsker(engine, tokenizer, config.sample_params, config.max_concurrency)
        self._readers: WorkerPool | None = None
        """For a pattern of the user's own, which may never end. Those that come with the judges take no time."""
        if config.pattern != type(config).model_fields["pattern"].default:
            limits = PoolLimits(num_workers=READERS, timeout_s=min(LONGEST_READING_S, config.timeout_s))
            self._readers = WorkerPool(locate_handler(find_words, kind="value"), limits)

    async def _said(self, rollout: RolloutState, turn: Try, **values: Any) -> str:
        """The judge's answer, without what it thought in tags. Asked again it has another seed."""
        question = self._config.template.format(
            prompt=conversation(rollout),
            label="" if rollout.ground_truth is None else str(rollout.ground_truth),
            data_source=rollout.data_source,
            **values,
        )
        messages = [{"role": "user", "content": question}]
        if self._config.system:
            messages.insert(0, {"role": "system", "content": self._config.system})
        text = await self._asker.ask(messages, seed_of(question, turn.number), turn.wait_until)
        if len(text) > MAX_ANSWER:
            raise CallFailed("abstention", f"the judge wrote {len(text)} characters; at most {MAX_ANSWER} are read")
        return text.rpartition("</think>")[2].partition("<think>")[0]

    async def _word(self, said: str, turn: Try) -> str:
        """The one thing that the judge said. Raises CallFailed when it said none, or two."""
        pattern = self._config.pattern
        words = find_words(pattern, said) if self._readers is None else await self._read(self._readers, said, turn)
        if len(words) == 1:
            return words[0]
        if not words:
            raise CallFailed("abstention", f"the judge's answer has nothing that fits {pattern!r}: {_end(said)}")
        shown = [word[:SHOWN] for word in words[:4]]
        raise CallFailed("abstention", f"the judge's answer has {shown}, which do not agree: {_end(said)}")

    async def _read(self, readers: WorkerPool, said: str, turn: Try) -> list[str]:
        try:
            reply = await readers.call([self._config.pattern, said], turn.wait_until)
        except CallFailed as failure:
            if failure.cause != "timeout":
                raise
            raise CallFailed(
                "timeout",
                f"pattern {self._config.pattern!r} did not end on the judge's answer of {len(said)} characters; "
                f"repetitions inside of repetitions do that: {_end(said)}",
            ) from None
        if "value" not in reply:
            raise CallFailed("abstention", f"pattern {self._config.pattern!r}: {reply.get('unjudged')}")
        words: list[str] = reply["value"]
        return words

    async def close(self) -> None:
        await self._asker.close()
        if self._readers is not None:
            await self._readers.close()


class LLMJudger(LLMBased):
    _config: LLMJudgerConfig

    async def call(self, group: Group, turn: Try) -> list[Answer]:
        (rollout,) = group
        said = await self._said(rollout, turn, response=rollout.response_text)
        return [Verdict(self._score(await self._word(said, turn), said), text=said)]

    def _score(self, word: str, said: str) -> float:
        config = self._config
        if config.choices:
            if word not in config.choices:
                raise CallFailed(
                    "abstention", f"the judge said {word[:SHOWN]!r}, which is none of {sorted(config.choices)}"
                )
            return config.choices[word]
        try:
            score = float(word)
        except ValueError:
            raise CallFailed(
                "abstention", f"the judge said {word[:SHOWN]!r}, which is no number: {_end(said)}"
            ) from None
        if not math.isfinite(score) or not config.min_score <= score <= config.max_score:
            bounds = f"{config.min_score:g} to {config.max_score:g}"
            raise CallFailed("abstention", f"the judge said {word[:SHOWN]}; a score is from {bounds}")
        return score


class PairwiseJudger(LLMBased):
    """Every comparison is a call of its own, and is remembered by itself: judged again, a group asks for the rest."""

    relative = True
    _config: PairwiseJudgerConfig

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        if len(group) < 2:
            return [Unjudged("there is no sibling to compare it with") for _ in group]
        pairs = list(itertools.combinations(range(len(group)), 2))
        if self._config.both_orders:
            pairs += [(second, first) for first, second in pairs]
        compared = await asyncio.gather(*(self._judged([group[first], group[second]]) for first, second in pairs))
        won: list[list[float]] = [[] for _ in group]
        missing: dict[int, str] = {}
        for pair, answers in zip(pairs, compared, strict=True):
            for index, answer in zip(pair, answers, strict=True):
                if isinstance(answer, Verdict):
                    won[index].append(answer.score)
                else:
                    missing.setdefault(index, answer.reason)
        return [
            Unjudged(f"a comparison with a sibling: {missing[index]}")
            if index in missing
            else Verdict(sum(scores) / len(scores), {"comparisons": float(len(scores))})
            for index, scores in enumerate(won)
        ]

    async def call(self, group: Group, turn: Try) -> list[Answer]:
        first, second = group
        said = await self._said(first, turn, first=first.response_text, second=second.response_text)
        word = await self._word(said, turn)
        if word not in self._config.words:
            raise CallFailed(
                "abstention", f"the judge said {word[:SHOWN]!r}, which is none of {list(self._config.words)}"
            )
        score = (1.0, 0.0, 0.5)[self._config.words.index(word)]
        return [Verdict(score, text=said), Verdict(1.0 - score, text=said)]

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        return (await self.judge_group([rollout]))[0]


class RankingJudger(LLMBased):
    relative = True
    _config: RankingJudgerConfig

    async def judge_group(self, group: Group) -> list[Verdict | Unjudged]:
        if len(group) < 2:
            return [Unjudged("there is no sibling to rank it with") for _ in group]
        return await super().judge_group(group)

    async def judge(self, rollout: RolloutState) -> Verdict | Unjudged:
        return (await self.judge_group([rollout]))[0]

    async def call(self, group: Group, turn: Try) -> list[Answer]:
        answers = "\n\n".join(f"[Answer {i}]\n{rollout.response_text}" for i, rollout in enumerate(group, start=1))
        said = await self._said(group[0], turn, answers=answers, count=len(group))
        # As text: a number may have more digits than Python makes one of.
        order = [number.lstrip("0") for number in re.findall(r"\d+", await self._word(said, turn))]
        if sorted(order) != sorted(str(i) for i in range(1, len(group) + 1)):
            ranked = ", ".join(order)[:100]
            raise CallFailed("abstention", f"the judge ranked [{ranked}]; each of 1 to {len(group)} belongs there once")
        behind = len(group) - 1
        return [Verdict((behind - order.index(str(i))) / behind, text=said) for i in range(1, len(group) + 1)]


def conversation(rollout: RolloutState) -> str:
    """What was asked: the text of a single user's message, else every message with its role."""
    messages = rollout.messages
    if len(messages) == 1 and messages[0].get("role") == "user":
        return str(messages[0].get("content") or "")
    return "\n\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in messages)


def _end(said: str) -> str:
    return repr(said[-SHOWN:])


def _template_problems(template: str, needed: frozenset[str]) -> Iterator[str]:
    known = _COMMON | needed | ({"count"} if "answers" in needed else set())
    try:
        found = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        yield f"template is no format string: {error}; braces that are meant as such are written twice"
        return
    if unknown := sorted(found - known):
        yield f"template has {{{unknown[0]}}}; there is {', '.join(f'{{{name}}}' for name in sorted(known))}"
    else:
        try:
            template.format(**(dict.fromkeys(known, "text") | {"count": 2}))
        except (ValueError, LookupError) as error:
            yield f"template cannot be filled in: {error}"
    if missing := sorted(needed - found):
        yield f"template has no {' and no '.join(f'{{{name}}}' for name in missing)}"


def _word_problems(words: Iterable[str], pattern: str, field: str) -> Iterator[str]:
    """Of words that the pattern that comes with the judge never finds."""
    for word in words:
        if re.fullmatch(pattern, f"[[{word}]]") is None:
            yield f"{field} has {word!r}, which {pattern!r} never finds; give pattern too"
            return


def _pattern_problems(pattern: str) -> Iterator[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield f"pattern is {pattern!r}; it is no regular expression: {error}"
        return
    if compiled.groups != 1:
        yield f"pattern is {pattern!r}; it must have one group, and has {compiled.groups}"
