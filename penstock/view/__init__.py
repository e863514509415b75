"""The live page: a run directory, read and shown. `penstock view RUN` serves it.

    history.py    events.jsonl, folded as it grows: steps, spans, engines, warnings
    groups.py     the ledger: where every group is, what was not trained and what that cost
    rollouts.py   trajectories and their index: one rollout read token by token
    alarms.py     what wants a person's attention, in words
    server.py     routes, and who may ask
    page/         what a browser gets

Reads only. A run that is under way, one that ended and one whose driver was killed are read alike.
"""
