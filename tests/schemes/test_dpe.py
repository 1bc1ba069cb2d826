"""DPE as a scheme; `test_pair_axis.py` has the engine under maps like these."""

import numpy as np
import pytest
import torch

from rope_patch import InvalidField, get_scheme, patch
from rope_patch.schemes import Checkpoint
from tests.definition import Definition, defined_logits
from tests.families import build
from tests.runs import assert_close, cached_logits, generated, left_padded, logits, positions_of, tokens
from tests.schemes.regions import rotated_distances

CASES = ["dpe:window=7,groups=[1,2,4,3]", "dpe:window=8,groups=[1,3],sizes=[3,5],shift=floor"]


def rule(window, steps, floor=False):
    """The rule for each pair, with the shift as in the authors' prefill, or as when they decode."""
    steps = np.array(steps)

    def distance(m, n):
        m, n = m[..., None], n[..., None]
        shift = window - window // steps if floor else window - window / steps
        return np.where(m - n < window, m - n, m // steps - n // steps + shift)

    return distance


DEFINITIONS = {
    CASES[0]: Definition(distance=rule(7, [1, 1, 2, 2, 4, 4, 3, 3])),
    CASES[1]: Definition(distance=rule(8, [1] * 3 + [3] * 5, floor=True)),
}


@pytest.mark.parametrize("spec", CASES)
def test_every_way_through_a_model_is_the_definition(spec):
    model, ids = build("llama"), tokens(40)
    expected = defined_logits(model, ids, DEFINITIONS[spec]).float()
    batch, mask = left_padded([ids, tokens(47, seed=1), tokens(51, seed=2)])
    with patch(model, spec):
        assert_close(logits(model, ids), expected, 1e-4)
        assert_close(cached_logits(model, ids, [9, 1, 1, 29]), expected, 1e-4)
        padded = logits(model, batch, attention_mask=mask, position_ids=positions_of(mask))
        assert_close(padded[:1, -40:], expected, 1e-4)


def test_equal_steps_are_self_extend(llama):
    with patch(llama, "self_extend:group_size=4,window=7"):
        expected, words = logits(llama, tokens()), generated(llama, tokens())
    with patch(llama, "dpe:window=7,groups=[4,4],shift=floor"):
        assert_close(logits(llama, tokens()), expected)
        assert torch.equal(generated(llama, tokens()), words)


def test_the_published_steps_have_eight_groups_of_eight():
    scheme = get_scheme("dpe:window=16,groups=[2,8,2,8,32,32,32,4]").resolve(Checkpoint(8192, 32, 8192, pairs=64))
    assert scheme.sizes == (8,) * 8
    m, n, found = rotated_distances(scheme, 96)
    steps = np.repeat([2, 8, 2, 8, 32, 32, 32, 4], 8)
    expected = np.asarray(rule(16, steps)(m.numpy(), n.numpy()), dtype=np.float64)
    causal = (m >= n).numpy()
    np.testing.assert_array_equal(found.numpy()[causal], expected[causal])


def test_groups_that_do_not_fit_the_pairs_are_named(llama):
    for spec, message in {
        "dpe:window=7,groups=[1,2,3]": r"dpe: 8 pairs cannot be shared equally by 3 groups; set sizes",
        "dpe:window=7,groups=[1,2],sizes=[4,3]": r"dpe: sizes=\[4, 3\] add to 7; this checkpoint has 8 pairs",
        "dpe:window=7,groups=[1,2],sizes=[8]": r"dpe: groups has 2 numbers, sizes 1",
        "dpe:window=7,groups=[1,0]": r"groups must be one integer of at least 1 per group of pairs",
        "dpe:window=7,groups=[1,1.5]": r"groups must be one integer of at least 1 per group of pairs",
    }.items():
        with pytest.raises(InvalidField, match=message):
            patch(llama, spec)
    with pytest.raises(InvalidField, match="does not rotate pairs"):
        get_scheme("dpe:window=7,groups=[1,2]").resolve(Checkpoint(64, 4, 64))
