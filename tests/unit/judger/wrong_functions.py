"""Reward functions with bugs."""

import re

CALLS = []


def subtracts(response, label, extra_info):
    return response - label


def misspelt(response, label, extra_info):
    return scorre(response)  # noqa: F821


def reads_a_missing_key(response, label, extra_info):
    return extra_info["difficulty"]


def imports_what_is_not_there(response, label, extra_info):
    import no_such_package

    return no_such_package.score(response)


def needs_a_number(response, label, extra_info):
    return int(response) == label


def needs_a_number_first(response, label, extra_info):
    return float(response.split()[0]) == label


def needs_a_match(response, label, extra_info):
    return re.search(r"#### (\d+)", response).group(1) == label


def returns_nothing(response, label, extra_info):
    response == label  # noqa: B015


def works_on_the_label(response, label, extra_info):
    if response != label:
        raise TypeError("what is this?")
    return 1.0


def slow(response, label, extra_info):
    import time

    time.sleep(3600)


async def asks_a_service(response, label, extra_info):
    CALLS.append(response)
    raise TypeError("never tried")


def merges_wrongly(verdicts):
    return verdicts.mean()
