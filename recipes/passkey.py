"""Hide keys or spans at every depth and length that a YAML file names, and draw what each scheme finds again.

    python recipes/passkey.py recipes/configs/passkey_tiny.yaml
    torchrun --nproc-per-node 4 recipes/passkey.py recipes/configs/passkey_tiny.yaml

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The same can be said
in the words of the command line: `rope-patch passkey --help`.
"""

from __future__ import annotations

import sys

from rope_patch.cli.common import run_quietly, run_recipe, show_outcome
from rope_patch.evaluation.retrieval.experiment import Retrieval, run
from rope_patch.evaluation.retrieval.report import print_tables


def main(config: str) -> None:
    outcome = run_quietly(run, Retrieval.from_yaml(config))
    show_outcome(outcome, lambda: print_tables(outcome.rows))


if __name__ == "__main__":
    sys.exit(run_recipe(__doc__, main))
