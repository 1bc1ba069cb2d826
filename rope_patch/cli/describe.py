"""`rope-patch describe`: what a checkpoint does about positions."""

from __future__ import annotations

import argparse
from typing import Any

from rope_patch.cli.common import busy
from rope_patch.cli.options import MODEL, add_json
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import print_json


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "describe",
        summary="what a checkpoint does about positions, or would under a scheme",
        description="""\
Say how a checkpoint encodes positions, and with --scheme what a scheme would change: where it is mounted, which layers
are left alone, which distances a few pairs of positions get.
""",
        examples=("rope-patch describe", "rope-patch describe --scheme rerope:window=128+logn"),
    )
    command.add_argument("--model", metavar="DIR", help=MODEL)
    command.add_argument("--scheme", metavar="SCHEME", help="such as yarn:factor=8 or rerope:window=128+logn")
    add_json(command)
    command.set_defaults(run=_describe)


def _describe(arguments: argparse.Namespace) -> None:
    from rope_patch.description import describe
    from rope_patch.evaluation.loading import default_checkpoint, load_model, quiet_transformers
    from rope_patch.patching import find_handle, patch
    from rope_patch.saving.rope_parameters import native_scheme

    path = arguments.model or default_checkpoint()
    with busy(f"loading {path}"), quiet_transformers():
        model = load_model(path, device="cpu")
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
    print_json(description)
