#!/usr/bin/env python3
"""The hook of pre-commit, which runs the package of this checkout: Python 3.10 is all that it needs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rope_patch.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(["--all", *sys.argv[1:]], "rope-doctor"))
