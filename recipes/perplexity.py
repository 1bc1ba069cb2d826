"""Draw perplexity against context length for the schemes, the checkpoint and the text that a YAML file names.

    python recipes/perplexity.py recipes/configs/demo.yaml
    torchrun --nproc-per-node 4 recipes/perplexity.py recipes/configs/demo.yaml

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The same can be said
in the words of the command line: `rope-patch perplexity --help`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rope_patch.cli.common import INTERRUPTED, run_politely
from rope_patch.cli.perplexity import run_perplexity, show_outcome
from rope_patch.evaluation.experiment import Experiment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    config = parser.parse_args().config
    return run_politely(
        lambda: show_outcome(run_perplexity(Experiment.from_yaml(config))),
        interrupted=INTERRUPTED,
    )


if __name__ == "__main__":
    sys.exit(main())
