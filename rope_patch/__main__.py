"""`python -m rope_patch`: the command line, where `rope-patch` is not on the path."""

import sys

from rope_patch.cli import main

if __name__ == "__main__":
    sys.exit(main())
