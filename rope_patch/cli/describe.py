"""`rope-patch describe`: what a checkpoint does about positions."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser("describe", help="what a checkpoint does about positions, or would under a scheme")
    command.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the one in the repository)")
    command.add_argument("--scheme", metavar="SCHEME", help="such as yarn:factor=8 or rerope:window=128+logn")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_describe, interrupted="interrupted")


def _describe(arguments: argparse.Namespace) -> None:
    from rope_patch.describe import describe
    from rope_patch.evaluation.loading import default_checkpoint, load_model, quiet_transformers
    from rope_patch.export import native_scheme
    from rope_patch.patch import find_handle, patch

    with quiet_transformers():
        model = load_model(arguments.model or default_checkpoint(), device="cpu")
    if arguments.scheme:
        patch(model, arguments.scheme)
    if not arguments.json:
        print(describe(model))
        return
    handle = find_handle(model)
    scheme = handle.scheme if handle else native_scheme(model)
    description = {
        "model": type(model).__name__,
        "patched": handle is not None,
        "scheme": scheme.to_dict(),
        "mount": handle.plan.mounts() if handle else "none",
        "left_alone": handle.plan.left_alone if handle else {},
    }
    print(json.dumps(description, indent=2))
