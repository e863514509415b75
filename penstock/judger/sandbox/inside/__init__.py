"""What runs inside a sandbox: the standard library and these files, and nothing else of Penstock.

    keeper.py   the first process of a sandbox: runs code in children, watches and ends them, tells the outside
    guest.py    what such a child does with the code under test: run it as a program, call it, serve its functions
    tester.py   what such a child does with tests: runs them, with the functions under test in another sandbox
    wire.py     plain data as JSON, with the types that JSON does not have
    guard.py    what a child gives up before it runs the code: memory, processes, files, system calls
    library.py  the standard library for code that may open no file
    enter.py    becomes the keeper in namespaces of its own, where bubblewrap is not there to do that

They are copied into every sandbox and imported there as the package `inside`.
"""
