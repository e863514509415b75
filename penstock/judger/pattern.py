"""What a regular expression finds in a text: the function that a worker process runs for a user's own pattern.

A pattern may take for ever on a text that nobody foresaw, and nothing interrupts the interpreter in it; a process can
be killed. Only the standard library is imported here: a replacement must be ready in a moment.
"""

from __future__ import annotations

import re

MOST_FOUND = 5
"""Things that differ; more than one is a contradiction already."""


def find_words(pattern: str, text: str) -> list[str]:
    """What its one group finds, each once, without the white space around it; in order of the alphabet."""
    different: set[str] = set()
    for match in re.finditer(pattern, text):
        if match.group(1) is not None:
            different.add(match.group(1).strip())
        if len(different) == MOST_FOUND:
            break
    return sorted(different)
