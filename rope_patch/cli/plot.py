"""`rope-patch plot`: the pictures."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser("plot", help="the pictures by which one understands position encodings")
    command.add_argument(
        "picture",
        metavar="NAME",
        help="sinusoidal, inner_product, wavelengths, decay_bound, scores_by_distance, biases or position_maps",
    )
    command.add_argument("--output", metavar="FILE", help="a PNG (default: NAME.png)")
    options = command.add_argument_group("options; a picture says which of them it takes")
    options.add_argument("--scheme", action="append", metavar="SCHEME", help="such as yarn:factor=8, may be repeated")
    options.add_argument("--base", action="append", type=float, metavar="B", help="of the frequencies, may be repeated")
    options.add_argument("--dim", action="append", type=int, metavar="D", help="dimensions, may be repeated")
    options.add_argument("--length", type=int, metavar="N", help="of the text, or the longest distance, in tokens")
    options.add_argument("--training-length", type=int, metavar="L", help="in tokens")
    options.add_argument("--heads", type=int, metavar="N", help="number of heads")
    options.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the one in the repository)")
    options.add_argument("--layer", type=int, metavar="N", help="of the checkpoint, from 0")
    options.add_argument("--text", metavar="PATH", help="a text file or a folder (default: Python's own source)")
    options.add_argument("--documents", type=int, metavar="N", help="how many texts at most")
    command.set_defaults(run=_plot, interrupted="interrupted")


def _plot(arguments: argparse.Namespace) -> None:
    from rope_patch.plots.command import draw
    from rope_patch.plots.style import save

    ours = ("picture", "output", "run", "interrupted")
    options = {name: value for name, value in vars(arguments).items() if name not in ours and value is not None}
    print(save(draw(arguments.picture, options), arguments.output or f"{arguments.picture}.png"))
