"""The text of segments, as the chat template writes it."""

from __future__ import annotations

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
TOOLS_SHOWN = (
    'system\n# Tools\n<tools>\n{"type": "function", "function": {"name": "add", "description": "Adds.", '
    '"parameters": {"type": "object"}}}\n</tools><|im_end|>\n'
)
START = "<|im_start|>"
HELLO = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1.0}}\n</tool_call>'


def said(text: str) -> tuple[str, bool]:
    """By the model."""
    return text + "<|im_end|>", True


def given(text: str) -> tuple[str, bool]:
    """By somebody else."""
    return text, False


def asked(text: str) -> tuple[str, bool]:
    """Between an answer and the next: the newline after the end of the turn, and the user's words."""
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", False
