"""Write a copy of a checkpoint whose config describes a scheme to Transformers, vLLM, llama.cpp, mlx-lm and others.

    rope-patch export recipes/assets/tiny-llama --scheme yarn:factor=4
    rope-patch export recipes/assets/tiny-llama --scheme yarn:factor=4 --output runs/tiny-llama-yarn4
    rope-patch export recipes/assets/tiny-llama --scheme mrrope:factor=4 --for transformers,vllm,mlx
    rope-patch export recipes/assets/tiny-llama --scheme yarn:target=auto --factors 1,2,4 --output runs/per-request
    rope-patch export FILE.gguf --scheme mrrope:factor=4 --output mrrope4.gguf

All static frequencies can be written: as their own rope_type, or as two equal lists of the type longrope. Lists are
used if there is no rope_type, or if more of the programs in --for (transformers, transformers4, vllm, llama.cpp, mlx,
sglang, onnx) read lists. For llama.cpp, a GGUF file of Llama's architecture gets the factors as a tensor: name another
GGUF file as the output. A scheme that acts inside attention is refused with the reason. Weights and tokenizer are not
changed. A checkpoint that was saved under a scheme needs no --scheme. With --factors the copy records a scheme for each
factor, and `rope-patch serve` and vLLM with the plugin choose by request. Without --output nothing is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from rope_patch.cli.options import (
    Folder,
    Numbers,
    OptionalFolder,
    OptionalLength,
    OptionalScheme,
    Positional,
    Readers,
    print_json,
    say,
)
from rope_patch.errors import EvaluationError


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[Folder]  # checkpoint folder, or a GGUF file, which is unpacked
    scheme: OptionalScheme = None  # scheme such as yarn:factor=4 (default: the one that the folder records)
    factors: Numbers = ()  # whole multiples of L that a request can reach, such as 1,2,4, for a scheme with target=auto
    length: OptionalLength = None  # longest context to serve (default: factor times L)
    readers: Readers = ""  # write for these programs and report on them, such as vllm,mlx (default: all)
    output: OptionalFolder = None  # folder or GGUF file to write (default: only show what would be written)
    link: bool = False  # make hard links to weights and tokenizer instead of copies
    dry_run: bool = False  # write nothing, even with --output
    json: bool = False  # print one JSON document


def main(options: Options) -> None:
    """Write the copy, or show its contents and the programs that read it.

    Raises:
        EvaluationError: the output is a GGUF file, and there is no scheme.
    """
    from rope_patch.models.config import checkpoint_of_config
    from rope_patch.saving.export import describe_serving, export_checkpoint
    from rope_patch.saving.loading import as_folder, load_config, quiet_transformers
    from rope_patch.serving.factors import schemes_by_factor

    if options.output is not None and options.output.endswith(".gguf") and not options.dry_run:
        from rope_patch.saving.gguf_export import export_gguf

        if options.scheme is None:
            raise EvaluationError(
                "a GGUF file records no scheme; name the one to export, such as --scheme yarn:factor=4"
            )
        length = export_gguf(options.checkpoint, options.output, options.scheme, options.length)
        print(f"{options.output}: {options.scheme}, served by llama.cpp up to {length} tokens")
        return
    readers = [name for name in options.readers.split(",") if name]
    with quiet_transformers(), as_folder(options.checkpoint) as folder:
        by_factor = None
        if options.factors:
            checkpoint = checkpoint_of_config(load_config(folder).get_text_config())
            by_factor = schemes_by_factor(options.scheme or "no scheme", options.factors, [checkpoint])
        if options.output is None or options.dry_run:
            serving = describe_serving(folder, options.scheme, options.length, readers, by_factor)
        else:
            serving = export_checkpoint(
                folder,
                options.output,
                options.scheme,
                length=options.length,
                readers=readers,
                link=options.link,
                by_factor=by_factor,
            )
    if options.json:
        print_json(serving.to_dict())
        return
    print(f"{serving.scheme}: L = {serving.training_length}, served up to {serving.length} tokens")
    if serving.warning:
        say(f"{serving.warning}")
    print(f"config.json changes:\n{json.dumps(serving.changed, indent=2)}")
    for reader in serving.readers:
        print(f"{reader.name:<20}{reader.reads:<8}{reader.words} ({reader.known})")
    print("nothing was written; name a folder with --output" if serving.output is None else f"folder  {serving.output}")
