"""`python -m rope_doctor`, and of rope_patch `python -m rope_patch.doctor`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
