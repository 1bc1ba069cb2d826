"""A copy of a checkpoint whose config carries a scheme for Transformers, vLLM and llama.cpp.

    rope-patch export recipes/assets/tiny-llama --scheme yarn:factor=4
    rope-patch export recipes/assets/tiny-llama --scheme yarn:factor=4 --output runs/tiny-llama-yarn4

Schemes of static frequencies can be written so (pi, ntk, abf, yarn, ntk_by_parts, llama3, longrope); whatever acts
inside attention cannot, and is refused with the reason. Weights and tokenizer are not changed. A checkpoint that was
saved under a scheme needs no --scheme. Without --output nothing is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from rope_patch.cli.options import Length, Positional, print_json


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[str]  # a checkpoint folder, or a GGUF file, which is unpacked
    scheme: str | None = None  # such as yarn:factor=4; default what it was saved under
    length: Length | None = None  # context to serve in tokens; default factor times L
    output: str | None = None  # the folder to write; without it, only show what would be written
    link: bool = False  # hard links instead of copies of weights and tokenizer
    dry_run: bool = False  # write nothing, even with --output
    json: bool = False  # print one JSON document


def main(options: Options) -> None:
    """Write the copy, or show what it would be, and who reads it."""
    from rope_patch.saving.export import describe_serving, export_checkpoint
    from rope_patch.saving.loading import as_folder, quiet_transformers

    with quiet_transformers(), as_folder(options.checkpoint) as folder:
        if options.output is None or options.dry_run:
            serving = describe_serving(folder, options.scheme, options.length)
        else:
            serving = export_checkpoint(
                folder, options.output, options.scheme, length=options.length, link=options.link
            )
    if options.json:
        print_json(serving.to_dict())
        return
    print(f"{serving.scheme}: L = {serving.training_length}, served up to {serving.length} tokens")
    print(f"config.json changes:\n{json.dumps(serving.changed, indent=2)}")
    for reader in serving.readers:
        print(f"{reader.name:<14}{reader.reads:<8}{reader.words}")
    print("nothing was written; name a folder with --output" if serving.output is None else f"folder  {serving.output}")
