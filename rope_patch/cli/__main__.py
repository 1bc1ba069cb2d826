"""`python -m rope_patch.cli`, for launchers."""

import sys

from rope_patch.cli import main

if __name__ == "__main__":
    sys.exit(main())
