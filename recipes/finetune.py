"""Fine-tune a checkpoint at a longer context under the schemes that a YAML file names, and draw before and after.

    python recipes/finetune.py recipes/configs/finetune_tiny.yaml
    accelerate launch --num_processes 2 recipes/finetune.py recipes/configs/finetune_tiny.yaml

The state is saved every few minutes; started again, the run goes on where it stopped. The script is
`rope-patch finetune`, whose options it has: `rope-patch finetune --help`.
"""

from __future__ import annotations

import sys

from rope_patch.cli import main_of_recipe

if __name__ == "__main__":
    sys.exit(main_of_recipe("finetune"))
