from __future__ import annotations

import asyncio

import pytest

from penstock import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [("12+34", "46"), (" 2*(3 - 4) ", "-2"), ("7/2", "3.5"), ("-(+3)", "-3"), ("1/3", "0.333333"), ("1e3", "1000")],
)
def test_it_calculates(expression: str, result: str) -> None:
    assert asyncio.run(calculator(expression)) == result


@pytest.mark.parametrize(
    "expression", ["", "a+1", "2**9", "__import__('os')", "1+", "'a'*9", "9*" * 90 + "9", "True", "1e15*2", "(" * 150]
)
def test_it_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError):
        asyncio.run(calculator(expression))


def test_division_by_zero_is_told_as_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(calculator("1/0"))
