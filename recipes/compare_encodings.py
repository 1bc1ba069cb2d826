"""Train the same small model once per position encoding and seed, and draw perplexity against context length.

    python recipes/compare_encodings.py recipes/configs/compare.yaml
    python recipes/compare_encodings.py recipes/configs/compare.yaml --costs

On two cores, two processes that share the work (and, last, the first command again for the whole table):

    OMP_NUM_THREADS=1 python recipes/compare_encodings.py recipes/configs/compare.yaml --only rope nope ... &
    OMP_NUM_THREADS=1 python recipes/compare_encodings.py recipes/configs/compare.yaml --only alibi t5 ...

Every row is written as soon as it is measured; started again, the run goes on where it stopped. The script is
`rope-patch compare`, whose options it has: `rope-patch compare --help`.
"""

from __future__ import annotations

import sys

from rope_patch.cli import main_of_recipe

if __name__ == "__main__":
    sys.exit(main_of_recipe("compare"))
