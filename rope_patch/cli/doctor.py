"""Check which positions Transformers, vLLM, SGLang, llama.cpp, mlx-lm and ONNX Runtime GenAI read from a folder.

    rope-patch doctor recipes/assets/tiny-llama
    rope-patch doctor recipes/assets/tiny-llama --for vllm,mlx

Each line ends with how this is known: the program was run, or its source was read. The exit status is 1 if a program
drops something.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from rope_patch.cli.options import Positional, Readers, print_json


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[str]  # checkpoint folder
    readers: Readers = ""  # only these programs, such as vllm,mlx
    json: bool = False  # print one JSON document


def main(options: Options) -> None:
    """Tell it, reader by reader."""
    from rope_patch.saving.doctor import diagnose
    from rope_patch.saving.loading import quiet_transformers

    with quiet_transformers():
        readings = diagnose(options.checkpoint, [name for name in options.readers.split(",") if name])
    if options.json:
        print_json([asdict(reading) for reading in readings])
    else:
        for reading in readings:
            print(f"{reading.reader:<20}{reading.understood} ({reading.known})")
            for sentence in reading.lost:
                print(f"{'':<20}lost: {sentence}")
            for sentence in reading.partly:
                print(f"{'':<20}partly: {sentence}")
            for sentence in reading.notes:
                print(f"{'':<20}note: {sentence}")
    if any(reading.lost for reading in readings):
        sys.exit(1)
