"""A calculator as a tool: what recipes and first tries call."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_OPERATIONS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_LENGTH = 200
LARGEST = 1e15


async def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: Numbers with + - * / and brackets, such as 2*(3+4).
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are read")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no expression of numbers with + - * / and brackets") from None
    return str(int(value)) if value == int(value) else str(round(value, 6))


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value: float = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("only numbers with + - * / and brackets are calculated")
    if abs(value) > LARGEST:
        raise ValueError(f"the numbers are too large; at most {LARGEST:g} is calculated")
    return value
