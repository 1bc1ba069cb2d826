"""Show which positions a checkpoint computes, or would compute under a scheme.

    rope-patch describe
    rope-patch describe --scheme rerope:window=128+logn
    rope-patch describe --scheme rerope:window=128+logn --attention 1024

With a scheme, the table shows where the scheme is mounted, which layers stay unchanged, and the rotated distances of a
few pairs of positions. --attention adds which executor scores each layer in a text of so many tokens, and why no other
executor does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_patch.cli.options import OptionalFolder, OptionalLength, OptionalScheme, print_json
from rope_patch.errors import EvaluationError


@dataclass(kw_only=True)
class Options:
    # checkpoint: a folder, a GGUF file or a Hub ID (default: the small checkpoint of the recipes)
    model: OptionalFolder = None
    scheme: OptionalScheme = None  # scheme to apply, such as yarn:target=8192 or rerope:window=128+logn
    attention: OptionalLength = None  # explain how each layer is scored in a text of this many tokens
    json: bool = False  # print one JSON document


def main(options: Options) -> None:
    """Load the checkpoint on the CPU and describe it."""
    from rope_patch import describe, explain, get_scheme, native_scheme
    from rope_patch.patching import find_handle, mount_scheme
    from rope_patch.saving.loading import default_checkpoint, load_model

    model = load_model(options.model or default_checkpoint(), device="cpu")
    if options.scheme:
        mount_scheme(model, get_scheme(options.scheme))  # what `patch` would warn of is among the rows
    if not options.json:
        print(describe(model))
        if options.attention is not None:
            print(f"\n{explain(model, ids_of_length(model, options.attention))}")
        return
    handle = find_handle(model)
    facts = {}
    if options.attention is not None:
        facts["attention"] = explain(model, ids_of_length(model, options.attention)).tables
    print_json(
        {
            **facts,
            "model": type(model).__name__,
            "patched": handle is not None,
            "scheme": (handle.scheme if handle else native_scheme(model)).to_dict(),
            "mount": handle.plan.mounts() if handle else "none",
            "left_alone": handle.plan.left_alone if handle else {},
        }
    )


def ids_of_length(model: Any, length: int) -> Any:
    """Some tokens of a vocabulary, `(1, length)`.

    Raises:
        EvaluationError: the length is below 1.
    """
    import torch

    if length < 1:
        raise EvaluationError(f"--attention {length}: a number of tokens of at least 1 is allowed")
    return torch.arange(length)[None] % model.get_input_embeddings().num_embeddings
