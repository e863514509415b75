"""Stop strings are found in the text of an answer, whatever pieces its tokens are."""

from __future__ import annotations

from collections.abc import Sequence

from engine_contract import CharacterTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.torch_engine.row import StopText


class ByteTokenizer(CharacterTokenizer):
    """Token i is the byte i: a character may need several tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def first_stop(tokenizer: CharacterTokenizer, stops: Sequence[str], ids: Sequence[int], given: int = 0) -> int | None:
    """How many tokens the answer has when it ends."""
    stop_text = StopText(stops, tokenizer, list(ids[:given]))
    return next((i + 1 for i in range(given, len(ids)) if stop_text.ends_with(ids[i])), None)


@settings(max_examples=100)
@given(text=st.text("abé漢😀", max_size=30), stops=st.lists(st.text("abé漢😀", min_size=1, max_size=3), min_size=1))
def test_the_token_that_completes_a_stop_string_ends_the_answer(text: str, stops: list[str]) -> None:
    ids = list(text.encode())
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    expected = len(text[: min(ends)].encode()) if ends else None
    assert first_stop(ByteTokenizer(), stops, ids) == expected


def test_a_stop_string_that_began_before_the_interruption_is_found() -> None:
    ids = CharacterTokenizer().encode("one two END three")
    assert first_stop(CharacterTokenizer(), ["END"], ids, given=9) == 11


def test_bytes_that_are_no_character_do_not_hide_what_follows() -> None:
    ids = [0x80] * 40 + list(b"stop here")
    assert first_stop(ByteTokenizer(), ["stop"], ids) == 44
