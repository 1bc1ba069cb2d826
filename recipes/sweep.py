"""Try many schemes on the checkpoint and the text that a YAML file names, and recommend one for the target length.

    python recipes/sweep.py recipes/configs/sweep_tiny.yaml
    torchrun --nproc-per-node 4 recipes/sweep.py recipes/configs/sweep_tiny.yaml

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The same can be said
in the words of the command line: `rope-patch sweep --help`.
"""

from __future__ import annotations

import sys

from rope_patch.cli.common import quietly, run_recipe
from rope_patch.cli.showing import show_outcome
from rope_patch.evaluation.sweep import Sweep, run
from rope_patch.evaluation.sweep_report import print_outcome


def main(config: str) -> None:
    outcome = quietly(run, Sweep.from_yaml(config))
    show_outcome(outcome, lambda console: print_outcome(outcome, console))


if __name__ == "__main__":
    sys.exit(run_recipe(__doc__, main))
