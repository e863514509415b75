"""How much memory a rollout's record takes: bytes a token, and bytes a rollout beside its tokens.

Prints one JSON line per figure. Groups of 8 share their prompt, as the sampler makes them.
"""

from __future__ import annotations

import gc
import json
import tracemalloc

import numpy as np

from penstock.rollout import Group, Prompt, RolloutState, Status, Tokens, Verdict

K = 8
GROUPS = 500


def make_groups(tokens: int) -> list[Group]:
    groups = []
    for draw in range(GROUPS):
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


def main() -> None:
    short, long = 64, 1064
    small, large = bytes_per_rollout(short), bytes_per_rollout(long)
    per_token = (large - small) / (long - short)
    detail = {"groups": GROUPS, "rollouts_per_group": K, "tokens": [short, long]}
    for figure, value in (
        ("records.bytes_per_token", per_token),
        ("records.bytes_per_rollout", small - per_token * short),
    ):
        print(json.dumps({"figure": figure, "value": round(value, 2), "unit": "bytes", "detail": detail}))


if __name__ == "__main__":
    main()
