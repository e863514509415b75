"""Where code that nobody has read is run: outside of Penstock's processes, without network, within limits.

    config.py   SandboxConfig
    walls.py    what keeps the code in: bubblewrap, namespaces, or limits alone; which of them work here
    box.py      Sandbox: one of them, for one job
    pool.py     SandboxPool: some are always ready
    inside/     what runs in there

A sandbox is used once. Nothing that is sent into one with the code is a right answer.
"""
