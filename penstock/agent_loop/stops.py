"""Stop strings that are special tokens: an answer's text never has them, because decoding leaves them out."""

from __future__ import annotations

import msgspec

from penstock.errors import ConfigError
from penstock.ports import Tokenizer
from penstock.rollout import SampleParams

_UNKNOWN = "\U0010fffd"
"""A character that no text has; a tokenizer without bytes encodes it as its unknown token."""


def resolve_stops(params: SampleParams, tokenizer: Tokenizer) -> SampleParams:
    """The same, with special tokens among `stop` moved to `stop_token_ids`.

    Raises ConfigError for a stop string that could never be found: a special token with other text around it, or a
    character that the tokenizer does not know.
    """
    texts: list[str] = []
    ids = list(params.stop_token_ids)
    for stop in params.stop:
        encoded = tokenizer.encode(stop)
        # Twice: some tokenizers leave out the space that a text begins with.
        left_out = [token for token in encoded if not tokenizer.decode([token, token])]
        if not left_out:
            texts.append(stop)
        elif len(encoded) == 1 and encoded != tokenizer.encode(_UNKNOWN):
            ids += encoded
        else:
            raise ConfigError(
                f"sample_params.stop has {stop!r}, which no answer's text can have: decoding leaves out token "
                f"{left_out[0]} of {encoded}. Give the special token alone, or its id in stop_token_ids."
            )
    if len(texts) == len(params.stop):
        return params
    return msgspec.structs.replace(params, stop=tuple(texts), stop_token_ids=tuple(dict.fromkeys(ids)))
