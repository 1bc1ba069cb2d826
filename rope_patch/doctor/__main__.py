"""The entry point of `python -m rope_doctor`, and inside rope_patch of `python -m rope_patch.doctor`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
