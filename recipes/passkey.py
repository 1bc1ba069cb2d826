"""Hide keys or spans at every depth and length that a YAML file names, and draw what each scheme finds again.

    python recipes/passkey.py recipes/configs/passkey_tiny.yaml

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The same can be said
in the words of the command line: `rope-patch passkey --help`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rope_patch.cli.common import INTERRUPTED, run_politely
from rope_patch.cli.passkey import run_retrieval, show_outcome
from rope_patch.evaluation.retrieval.experiment import Retrieval


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    config = parser.parse_args().config
    return run_politely(
        lambda: show_outcome(run_retrieval(Retrieval.from_yaml(config))),
        interrupted=INTERRUPTED,
    )


if __name__ == "__main__":
    sys.exit(main())
