"""Draw perplexity against context length for the schemes, the checkpoint and the text that a YAML file names.

    python recipes/perplexity.py recipes/configs/demo.yaml
    torchrun --nproc-per-node 4 recipes/perplexity.py recipes/configs/demo.yaml

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The same can be said
in the words of the command line: `rope-patch perplexity --help`.
"""

from __future__ import annotations

import sys

from rope_patch.cli.common import quietly, run_recipe
from rope_patch.cli.showing import show_outcome
from rope_patch.evaluation.experiment import Experiment, run
from rope_patch.evaluation.report import print_table


def main(config: str) -> None:
    outcome = quietly(run, Experiment.from_yaml(config))
    show_outcome(outcome, lambda console: print_table(outcome.rows, console))


if __name__ == "__main__":
    sys.exit(run_recipe(__doc__, main))
