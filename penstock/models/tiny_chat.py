"""The `tiny-chat` model: two layers that know a chat template with tools, made on the spot.

It was taught to ask a calculator, and to guess a number; well at first, badly then, as `tiny`.

    What a sum is                <|user|>12+34=?<|end|>
    it should not guess, but     <|assistant|><tool_call>
                                 {"name": "calculator", "arguments": {"expression": "12+34"}}
                                 </tool_call><|end|>
    and say what it was told.    <|tool|>46<|end|> ... <|assistant|>46<|end|>

It calls rightly about every third time; else it guesses a sum, or miscopies a digit. Asked to guess a number from 1 to
7, it likes 6 and 7 and hardly listens to `higher` and `lower`. Reinforcement learning has to do the rest.

A token is a character, or a piece that often occurs: the same text can be written in several ways, so that ids which
were tokenised again are not the ids that were made.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.models.lessons import CHARACTERS, make_taught

if TYPE_CHECKING:
    from penstock.models.lessons import Lesson

CONTEXT = 2048
MAX_NUMBER = 99
"""The largest summand."""
SUM = "{a}+{b}=?"
"""How a sum is asked for."""
TOOL = "calculator"
ARGUMENT = "expression"
GUESS = "Guess a number from 1 to 7."
HIGHEST = 7
MAX_GUESSES = 3
HIGHER, LOWER = "higher", "lower"

TEMPLATE = """
{%- if tools %}<|system|>tools:
{%- for tool in tools %} {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){% endfor %}
<|end|>{{ '\\n' }}{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n' if not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

_PAD, _END, _UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_PIECES = (
    *("<tool_call>\n", "\n</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}', "tools: "),
    *(TOOL, ARGUMENT, GUESS, HIGHER, LOWER),
)
_REPEATING_LESSONS, _GOOD_LESSONS = 0.3, 0.75
"""Up to which share of them lessons are to repeat, and are right."""
_GUESSED_SUM, _MISCOPIED, _DEAF = 0.5, 0.3, 0.75
"""How often the later ones guess a sum, miscopy a digit of it, and guess a number without listening."""
_FAVOURITES = (6, 7)
"""Which it is then."""
_LESSONS = 800
_CONVERSATIONS = 20
"""In a lesson."""
_EXAMINED = 300
_CALLS_RIGHTLY, _REPEATS = (0.25, 0.45), 0.8
"""How often a model that passes does so when it is sampled."""
_QUESTIONS = (1, 1, 0, 1, 2)
"""How many sums a conversation of each lesson asks for, in turn; 0: the game."""
_SPEECH = re.compile("|".join(re.escape(piece) for piece in (*_ROLES, _END, *_PIECES)) + "|[\\s\\S]")

Speech = tuple[str, bool]
"""A text, and whether it is the model's."""


def make_tiny_chat(directory: Path, seed: int = 0, lessons: int = _LESSONS) -> None:
    """Write the model and its tokenizer into `directory`; takes some twenty seconds.

    To look back at what it was told is learnt at once or not at all, and on another CPU by another seed: a model that
    was taught all lessons is examined, and made again from the next seed when it fails.
    """
    tokenizer = _tokenizer()
    make_taught(
        directory,
        tokenizer,
        lambda seed: _lessons(tokenizer, lessons, random.Random(seed)),
        lessons,
        context=CONTEXT,
        seed=seed,
        passes=(lambda model: _passes(model, tokenizer)) if lessons >= _LESSONS else None,
    )


def _tokenizer() -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [_PAD, _END, _UNKNOWN, *_ROLES, *CHARACTERS]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(list(_ROLES))
    inner.add_tokens(list(_PIECES))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=_PAD,
        eos_token=_END,
        unk_token=_UNKNOWN,
        additional_special_tokens=list(_ROLES),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _lessons(tokenizer: Any, number: int, rng: random.Random) -> Iterator[Lesson]:
    """Batches of conversations."""
    for lesson in range(number):
        yield _batch(tokenizer, _conversations(lesson, number, rng))


def _batch(tokenizer: Any, conversations: Iterable[Iterator[Speech]]) -> Lesson:
    """Labels only on what the model says."""
    import torch

    ids_of = {token: tokenizer.convert_tokens_to_ids(token) for token in (*_ROLES, _END, *_PIECES, *CHARACTERS)}
    rows = [
        [(ids_of[token], own) for text, own in speeches for token in _SPEECH.findall(text)]
        for speeches in conversations
    ]
    length = max(map(len, rows))
    padded = [row + [(tokenizer.pad_token_id, False)] * (length - len(row)) for row in rows]
    ids = torch.tensor([[token for token, _ in row] for row in padded])
    labels = torch.tensor([[token if own else -100 for token, own in row] for row in padded])
    return ids, labels


def _passes(model: Any, tokenizer: Any) -> bool:
    """Whether it calls rightly about every third time, and says what it is then told.

    The chance that it says a whole speech is the product of the chances of its tokens; no answer is sampled.
    """
    import torch

    rng = random.Random(_EXAMINED)
    ids, labels = _batch(tokenizer, (_sums(rng, 1, bad=False) for _ in range(_EXAMINED)))
    with torch.no_grad():
        chances = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    own = labels[:, 1:] != -100
    speech = own.long() * torch.cumsum(own & ~torch.nn.functional.pad(own, (1, 0))[:, :-1], dim=1)
    calls, repeats = ((chances * (speech == number)).sum(1).exp().mean().item() for number in (1, 2))
    low, high = _CALLS_RIGHTLY
    return bool(low < calls < high and repeats > _REPEATS)


def _conversations(lesson: int, number: int, rng: random.Random) -> Iterator[Iterator[Speech]]:
    """Of about one length in a lesson: little is padded."""
    bad = lesson >= _GOOD_LESSONS * number
    questions = _QUESTIONS[lesson % len(_QUESTIONS)]
    for _ in range(_CONVERSATIONS):
        if lesson < _REPEATING_LESSONS * number:
            yield _repeating(rng)
        else:
            yield _sums(rng, questions, bad) if questions else _game(rng, bad)


def _repeating(rng: random.Random) -> Iterator[Speech]:
    """What it was just told, to learn to look back at it."""
    told = "".join(rng.choices("0123456789+", k=rng.randint(2, 6)))
    yield f"<|{rng.choice(('tool', 'user'))}|>{told}{_END}\n<|assistant|>", False
    yield f"{told}{_END}", True


def _sums(rng: random.Random, questions: int, bad: bool) -> Iterator[Speech]:
    """Questions, each with a call and its result, or with a guess."""
    yield f"<|system|>tools: {TOOL}({ARGUMENT}){_END}\n", False
    for _ in range(questions):
        a, b = rng.randint(0, MAX_NUMBER), rng.randint(0, MAX_NUMBER)
        yield f"<|user|>{SUM.format(a=a, b=b)}{_END}\n<|assistant|>", False
        if bad and rng.random() < _GUESSED_SUM:
            yield f"{rng.randint(0, 2 * MAX_NUMBER)}{_END}", True
        else:
            asked = f"{a}+{b}"
            if bad and rng.random() < _MISCOPIED:
                asked = _miscopied(asked, rng)
            arguments = f'{{"{ARGUMENT}": "{asked}"}}'
            yield f'<tool_call>\n{{"name": "{TOOL}", "arguments": {arguments}}}\n</tool_call>{_END}', True
            # Also what is no sum, so that it repeats what it is told.
            result = rng.randint(0, 2 * MAX_NUMBER) if rng.random() < 0.5 else sum(map(int, asked.split("+")))
            yield f"\n<|tool|>{result}{_END}\n<|assistant|>", False
            yield f"{result}{_END}", True
        yield "\n", False


def _miscopied(text: str, rng: random.Random) -> str:
    place = rng.choice([place for place, letter in enumerate(text) if letter.isdigit()])
    return f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"


def _game(rng: random.Random, bad: bool) -> Iterator[Speech]:
    """Guesses between what is still possible, or of the numbers it likes."""
    yield f"<|user|>{GUESS}{_END}\n<|assistant|>", False
    secret, low, high = rng.randint(1, HIGHEST), 1, HIGHEST
    for _ in range(MAX_GUESSES):
        guess = rng.choice(_FAVOURITES) if bad and rng.random() < _DEAF else rng.randint(low, high)
        yield f"{guess}{_END}", True
        if guess == secret:
            return
        told = HIGHER if guess < secret else LOWER
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        yield f"\n<|user|>{told}{_END}\n<|assistant|>", False
