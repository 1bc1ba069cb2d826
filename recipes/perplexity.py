"""Draw perplexity against context length for the schemes, the checkpoint and the text that a YAML file names.

    python recipes/perplexity.py recipes/configs/demo.yaml
    torchrun --nproc-per-node 4 recipes/perplexity.py recipes/configs/demo.yaml

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The same can be said
in the words of the command line: `rope-patch perplexity --help`.
"""

from __future__ import annotations

import sys

from rope_patch.cli.common import run_quietly, run_recipe, show_outcome
from rope_patch.evaluation.experiment import Experiment, run
from rope_patch.evaluation.report import print_table


def main(config: str) -> None:
    outcome = run_quietly(run, Experiment.from_yaml(config))
    show_outcome(outcome, lambda: print_table(outcome.rows))


if __name__ == "__main__":
    sys.exit(run_recipe(__doc__, main))
