from __future__ import annotations

from collections import Counter

import pytest

from penstock.replay.accounting import TokenAccount


def test_an_account_that_adds_up_passes() -> None:
    TokenAccount(generated=10, trained=4, held=3, wasted=Counter(failed=2, re_rolled=1)).check()


def test_a_missing_token_is_noticed() -> None:
    with pytest.raises(AssertionError, match="tokens lost or invented"):
        TokenAccount(generated=10, trained=4, held=3, wasted=Counter(failed=2)).check()
