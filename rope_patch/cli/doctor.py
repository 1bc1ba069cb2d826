"""What Transformers, vLLM and llama.cpp will understand of a folder's positions, and what they will drop.

    rope-patch doctor recipes/assets/tiny-llama

Exit status 1 where something is lost.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from rope_patch.cli.options import Positional, print_json


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[str]  # a checkpoint folder
    json: bool = False  # print one JSON document


def main(options: Options) -> None:
    """Tell it, reader by reader."""
    from rope_patch.saving.doctor import diagnose
    from rope_patch.saving.loading import quiet_transformers

    with quiet_transformers():
        readings = diagnose(options.checkpoint)
    if options.json:
        print_json([asdict(reading) for reading in readings])
    else:
        for reading in readings:
            print(f"{reading.reader:<16}{reading.understood}")
            for sentence in reading.lost:
                print(f"{'':<16}lost: {sentence}")
    if any(reading.lost for reading in readings):
        sys.exit(1)
