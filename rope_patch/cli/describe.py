"""Show which positions a checkpoint computes, or would under a scheme.

    rope-patch describe
    rope-patch describe --scheme rerope:window=128+logn

With a scheme: where it is mounted, which layers are left alone, which distances a few pairs of positions get.
"""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.cli.options import Text, print_json


@dataclass(kw_only=True)
class Options:
    model: Text = None  # checkpoint: a folder, a GGUF file or a Hub ID; without it, the small checkpoint of the recipes
    scheme: Text = None  # scheme to apply, such as yarn:target=8192 or rerope:window=128+logn
    json: bool = False  # print one JSON document


def main(options: Options) -> None:
    """Load the checkpoint on the CPU and describe it."""
    from rope_patch import describe, get_scheme, native_scheme
    from rope_patch.patching import find_handle, mount_scheme
    from rope_patch.saving.loading import default_checkpoint, load_model

    model = load_model(options.model or default_checkpoint(), device="cpu")
    if options.scheme:
        mount_scheme(model, get_scheme(options.scheme))  # what `patch` would warn of is among the rows
    if not options.json:
        print(describe(model))
        return
    handle = find_handle(model)
    print_json(
        {
            "model": type(model).__name__,
            "patched": handle is not None,
            "scheme": (handle.scheme if handle else native_scheme(model)).to_dict(),
            "mount": handle.plan.mounts() if handle else "none",
            "left_alone": handle.plan.left_alone if handle else {},
        }
    )
