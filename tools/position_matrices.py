"""Print what a scheme does to each pair of a query and a key, as numbers: no model is needed.

    python -m tools.position_matrices rerope:window=4 --length 10
    python -m tools.position_matrices alibi --heads 4 --length 8

Rows are queries, columns are keys; "-" is not attended. A scheme with a bias by distance shows what is added to the
scores, a matrix for each head; any other the distance by which a pair is rotated. `pictures.py`
draws the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rope_patch.cli.options import Positional, print_json, run
from rope_patch.errors import InvalidField

if TYPE_CHECKING:
    import torch

    from rope_patch.schemes import Scheme
    from rope_patch.typing import Weights


@dataclass(kw_only=True)
class Options:
    scheme: Positional[str]  # such as rerope:window=4
    length: int = 12  # positions, from 0
    training_length: int = 64  # L in tokens, which defaults such as a window come from
    heads: int = 2  # of attention, where there is a bias
    json: bool = False  # print one JSON document; what is not attended is null


def main(options: Options) -> None:
    """The matrix of rotated distances, or those of the biases."""
    import torch

    from rope_patch.schemes import get_scheme
    from rope_patch.schemes.slots import Checkpoint

    for name in ("length", "training_length", "heads"):
        if (value := getattr(options, name)) < 1:
            raise InvalidField(f"{name}={value} is not allowed; it must be a whole number of at least 1")
    scheme = get_scheme(options.scheme)
    if "bias" in scheme.methods:
        matrices = bias_matrices(scheme, options.heads, options.length)
    else:
        resolved = scheme.resolve(Checkpoint(options.training_length, 1, max(options.length, options.training_length)))
        m, n = torch.arange(options.length)[:, None], torch.arange(options.length)
        matrices = rotated_distances(resolved, m, n).masked_fill(m < n, math.nan)[None]
    if options.json:
        print_json([[[None if math.isnan(x) else x for x in row] for row in each] for each in matrices.tolist()])
        return
    for matrix in matrices.tolist():
        shown = [["-" if math.isnan(x) else f"{x + 0.0:.4g}" for x in row] for row in matrix]
        width = max(len(word) for row in shown for word in row)
        print(*("  ".join(f"{word:>{width}}" for word in row) for row in shown), sep="\n", end="\n\n")


def rotated_distances(scheme: Scheme, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """phi_q(m) - phi_k(n) of the region that holds each pair; NaN where no region does, so that it is not attended.

    The scheme has its defaults filled in, see `Scheme.resolve`; one without segments leaves m - n as it is. `m` and `n`
    are integer positions of queries and keys, broadcastable to the float64 that is returned.
    """
    import torch

    if "segments" not in scheme.slots:
        return (m - n).double()
    distances = torch.full(torch.broadcast_shapes(m.shape, n.shape), math.nan, dtype=torch.float64)
    for region in scheme.at_length(int(m.max()) + 1).segments():
        there = region.query_map(m).double() - region.key_map(n).double()
        distances = torch.where(region.contains(m, n), there, distances)
    return distances


def bias_matrices(
    scheme: Scheme, num_heads: int, length: int, weights: Weights | None = None, bidirectional: bool = False
) -> torch.Tensor:
    """b(m, n) of a scheme whose bias depends on the distance: float64, `(heads, length, length)`, rows are queries.

    `weights` are learned parameters by name; default as they start in an untrained model. Keys after the query are NaN,
    unless attention is `bidirectional`.
    """
    import torch

    from rope_patch.schemes.slots import Checkpoint, ModelShape

    if "bias" not in scheme.methods:
        raise InvalidField(f"{scheme} fills {', '.join(sorted(scheme.slots))} and has no bias by distance, as alibi")
    resolved = scheme.resolve(Checkpoint(length, num_heads, length, bidirectional))
    if weights is None:
        shape = ModelShape(num_heads, 64, 64 * num_heads, 1, 1, length, 64)
        weights = resolved.parameters(shape, torch.Generator().manual_seed(0))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    bias = resolved.bias(distance, num_heads, weights).detach().double()
    if len(bias) != num_heads:
        raise InvalidField(f"num_heads={num_heads} is not allowed; the weights of {scheme} are for {len(bias)} heads")
    return bias if bidirectional else bias.masked_fill(distance < 0, math.nan)


if __name__ == "__main__":
    run(Options, main)
