"""Try many schemes on the checkpoint and the text that a YAML file names, and recommend one for the target length.

    python recipes/sweep.py recipes/configs/sweep_tiny.yaml

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The same can be said
in the words of the command line: `rope-patch sweep --help`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rope_patch.cli.common import INTERRUPTED, run_politely
from rope_patch.cli.sweep import run_sweep
from rope_patch.evaluation.sweep import Sweep
from rope_patch.evaluation.sweep_report import print_outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    config = parser.parse_args().config
    return run_politely(lambda: print_outcome(run_sweep(Sweep.from_yaml(config))), interrupted=INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
