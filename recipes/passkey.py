"""Hide keys or spans at every depth and length that a YAML file names, and draw what each scheme finds again.

    python recipes/passkey.py recipes/configs/passkey_tiny.yaml
    torchrun --nproc-per-node 4 recipes/passkey.py recipes/configs/passkey_tiny.yaml

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The same can be said
in the words of the command line: `rope-patch passkey --help`.
"""

from __future__ import annotations

import sys

from rope_patch.cli.common import quietly, run_recipe
from rope_patch.cli.showing import show_outcome
from rope_patch.evaluation.retrieval.experiment import Retrieval, run
from rope_patch.evaluation.retrieval.report import print_tables


def main(config: str) -> None:
    outcome = quietly(run, Retrieval.from_yaml(config))
    show_outcome(outcome, lambda console: print_tables(outcome.rows, console))


if __name__ == "__main__":
    sys.exit(run_recipe(__doc__, main))
