"""The live page: a run directory, read and shown. `penstock view RUN` serves it.

    runs.py       what the page asks of a run directory; its events are folded by `trainer/history.py`
    groups.py     the ledger: where every group is, what was not trained and what that cost
    lanes.py      what the rollouts of one batch did, and when
    rollouts.py   trajectories and their index: one rollout read token by token
    server.py     routes, and who may ask
    page/         what a browser gets

Reads only. A run that is under way, one that ended and one whose driver was killed are read alike.
"""
