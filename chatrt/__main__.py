"""`python -m chatrt`: the command line. Knows: nothing but its entry."""

from __future__ import annotations

import sys

from chatrt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
