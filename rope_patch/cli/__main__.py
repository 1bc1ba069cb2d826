"""`python -m rope_patch.cli`, for launchers."""

import sys

from rope_patch.cli import main

sys.exit(main())
