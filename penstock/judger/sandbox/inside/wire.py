"""Plain data as JSON: also fractions, decimals, tuples, sets, bytes and dicts with any keys. What is no plain data
becomes a handle.

The other side may send anything. Decoding makes nothing but plain data of it, or raises ValueError.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
MAX_BITS = 8000

_SEQUENCES: dict[str, type[Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset}


class Unsendable(Exception):
    """A value that only makes sense in the process that made it."""


def refuse(value: Any) -> Any:
    raise Unsendable(f"a {type(value).__name__} cannot be sent")


def pack(value: Any, refer: Callable[[Any], Any] = refuse) -> Any:
    """As JSON can say it. `refer` gives a handle for what is no plain data, or raises Unsendable."""
    return _pack(value, refer, 0)


def _pack(value: Any, refer: Callable[[Any], Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Unsendable(f"it is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        # Python refuses to write larger ones in decimals.
        return int(value) if value.bit_length() < MAX_BITS else {"i": format(int(value), "x")}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if _is(value, "fractions", "Fraction"):
        return {"q": [format(value.numerator, "x"), format(value.denominator, "x")]}
    if _is(value, "decimal", "Decimal"):
        return {"m": str(value)}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    if isinstance(value, dict):
        return {"d": [[_pack(k, refer, depth + 1), _pack(v, refer, depth + 1)] for k, v in value.items()]}
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {tag: [_pack(item, refer, depth + 1) for item in value]}
    return {"h": refer(value)}


def _is(value: Any, module: str, name: str) -> bool:
    """Of a module that nobody who has no such value needs to load."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name, ()))


def no_handle(handle: Any) -> Any:
    raise ValueError("a handle, where there is none")


def unpack(said: Any, find: Callable[[Any], Any] = no_handle) -> Any:
    """`find` gives what a handle stands for. Raises ValueError for what `pack` does not make."""
    if said is None or isinstance(said, bool | int | float | str):
        return said
    if not isinstance(said, dict) or len(said) != 1:
        raise ValueError("no plain data")
    ((tag, held),) = said.items()
    if tag == "h":
        return find(held)
    if tag == "b" and isinstance(held, str):
        return bytes.fromhex(held)
    if tag == "i" and isinstance(held, str):
        return int(held, 16)
    if tag == "m" and isinstance(held, str):
        return _decimal(held)
    if not isinstance(held, list):
        raise ValueError("no plain data")
    try:
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](unpack(item, find) for item in held)
        if tag == "d":
            return {unpack(key, find): unpack(value, find) for key, value in held}
        if tag == "c":
            real, imaginary = held
            return complex(float(real), float(imaginary))
        if tag == "q":
            from fractions import Fraction

            numerator, denominator = held
            return Fraction(int(numerator, 16), int(denominator, 16))
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"no plain data: {error}") from None
    raise ValueError("no plain data")


def _decimal(said: str) -> Any:
    from decimal import Decimal

    try:
        return Decimal(said)
    except ArithmeticError:
        raise ValueError("no plain data") from None


def dumps(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def loads(body: bytes) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("nested too deep") from None
