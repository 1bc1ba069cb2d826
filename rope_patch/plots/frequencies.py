"""The frequencies of a scheme on a checkpoint, without a model."""

from __future__ import annotations

import torch

from rope_patch.plots.checks import require_count, require_slot
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint
from rope_patch.typing import Frequencies, RotarySpec

_EXAMPLES = ("rope", "pi", "ntk", "yarn")


def frequencies_of(scheme: Scheme, rotary: RotarySpec, length: int | None = None) -> Frequencies:
    """f of a scheme that fills `frequencies`, for one text.

    Args:
        scheme: such as `YaRN(factor=8)`.
        rotary: of the checkpoint.
        length: of the text in tokens, for a scheme that follows it; default the training length.

    Returns:
        `inv_freq` and `decay` in float64, `(d/2,)`, and `attention_scaling` as a number.

    Raises:
        InvalidField: when the scheme has no frequencies, or naming the wrong argument.
    """
    require_slot(scheme, "frequencies", _EXAMPLES)
    trained = rotary.training_length
    length = trained if length is None else length
    require_count("length", length)
    resolved = scheme.resolve(Checkpoint(trained, num_heads=1, max_length=max(length, trained)))
    found = resolved.frequencies(rotary, torch.tensor([length]) if resolved.length_dependent else None)
    return Frequencies(
        found.inv_freq.double().view(-1),
        float(found.attention_scaling),
        None if found.decay is None else found.decay.double(),
    )
