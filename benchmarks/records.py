"""How much a rollout's record takes, in memory and in the ledger: bytes a token, and bytes a rollout beside them.

Prints one JSON line per figure. Groups of 8 share their prompt, as the sampler makes them.
"""

from __future__ import annotations

import gc
import json
import tracemalloc

import numpy as np

from penstock.replay.codec import encode_rollouts
from penstock.rollout import Group, Prompt, RolloutState, Status, Tokens, Verdict

K = 8
GROUPS = 500


def make_groups(tokens: int, n: int = GROUPS) -> list[Group]:
    groups = []
    for draw in range(n):
        prompt = Prompt(ids=bytes(4 * 64), ground_truth="42", data_source="sums")
        group = []
        for k in range(K):
            rollout = RolloutState(
                prompt=prompt, task_name="sums", group_id=f"sums:{draw}", rollout_id=f"sums:{draw}:{k}", draw=draw
            )
            ids = np.arange(tokens, dtype=np.int32)
            rollout.response = Tokens().append(ids, ids.astype(np.float32), steps=((1, tokens - 1), (2, 1)))
            rollout.reward = Verdict(0.5, {"format": 1.0})
            rollout.status = Status.COMPLETED
            group.append(rollout)
        groups.append(group)
    return groups


def bytes_per_rollout(tokens: int) -> float:
    gc.collect()
    tracemalloc.start()
    groups = make_groups(tokens)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / (len(groups) * K)


def stored_bytes_per_rollout(tokens: int) -> float:
    group = make_groups(tokens, 1)[0]
    return len(encode_rollouts(group)) / K


def main() -> None:
    short, long = 64, 1064
    detail = {"groups": GROUPS, "rollouts_per_group": K, "tokens": [short, long]}
    for where, measure in (("", bytes_per_rollout), ("stored_", stored_bytes_per_rollout)):
        small, large = measure(short), measure(long)
        per_token = (large - small) / (long - short)
        for figure, value in (
            (f"records.{where}bytes_per_token", per_token),
            (f"records.{where}bytes_per_rollout", small - per_token * short),
        ):
            print(json.dumps({"figure": figure, "value": round(value, 2), "unit": "bytes", "detail": detail}))


if __name__ == "__main__":
    main()
