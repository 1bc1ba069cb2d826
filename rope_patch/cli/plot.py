"""`rope-patch plot`: the pictures."""

from __future__ import annotations

import argparse
from typing import Any

from rope_patch.cli.common import busy
from rope_patch.cli.options import MODEL, add_json
from rope_patch.cli.parser import add_command
from rope_patch.cli.showing import print_json

PICTURES = (
    "sinusoidal",
    "inner_product",
    "wavelengths",
    "decay_bound",
    "scores_by_distance",
    "biases",
    "position_maps",
)
"""The names that `rope_patch.plots.command` knows, here for the help, which does not wait for matplotlib."""

OPTIONS = ("scheme", "base", "dim", "length", "training_length", "heads", "model", "layer", "text", "documents")


def add(commands: Any) -> None:
    """Register the command."""
    command = add_command(
        commands,
        "plot",
        summary="the pictures by which one understands position encodings",
        description="""\
Draw one of the pictures: how fast each pair of dimensions turns, how the inner product falls with distance, which
distance a scheme gives which pair of positions, and others. Each takes some of the options, and an option that it does
not take is refused with those that it does.
""",
        examples=(
            "rope-patch plot wavelengths --scheme yarn:factor=8",
            "rope-patch plot position_maps --scheme rerope:window=16 --scheme self_extend:group_size=4,window=16",
            "rope-patch plot scores_by_distance --documents 2",
        ),
        written="NAME.png in the current folder, or the file that --output names.",
    )
    command.add_argument("picture", metavar="NAME", help=f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    command.add_argument("--output", metavar="FILE", help="a PNG (default: NAME.png)")
    add_json(command)
    options = command.add_argument_group("options of the pictures")
    options.add_argument("--scheme", action="append", metavar="SCHEME", help="such as yarn:factor=8, may be repeated")
    options.add_argument("--base", action="append", type=float, metavar="B", help="of the frequencies, may be repeated")
    options.add_argument("--dim", action="append", type=int, metavar="D", help="dimensions, may be repeated")
    options.add_argument("--length", type=int, metavar="N", help="of the text, or the longest distance, in tokens")
    options.add_argument("--training-length", type=int, metavar="L", help="in tokens")
    options.add_argument("--heads", type=int, metavar="N", help="number of heads")
    options.add_argument("--model", metavar="DIR", help=MODEL)
    options.add_argument("--layer", type=int, metavar="N", help="of the checkpoint, from 0")
    options.add_argument("--text", metavar="PATH", help="a text file or a folder (default: Python's own source)")
    options.add_argument("--documents", type=int, metavar="N", help="how many texts at most")
    command.set_defaults(run=_plot)


def _plot(arguments: argparse.Namespace) -> None:
    from rope_patch.plots.command import draw
    from rope_patch.plots.style import save

    options = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    with busy(f"drawing {arguments.picture}"):
        path = save(draw(arguments.picture, options), arguments.output or f"{arguments.picture}.png")
    if arguments.json:
        print_json({"name": arguments.picture, "options": options, "picture": str(path)})
    else:
        print(path)
