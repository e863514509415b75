"""`python -m penstock.cli` is `penstock`."""

import sys

if not sys.flags.safe_path:
    # `-m` puts the working directory first: a `json.py` or `torch.py` there would stand in for the library.
    sys.path.append(sys.path.pop(0))

from penstock.cli import main

sys.exit(main())
