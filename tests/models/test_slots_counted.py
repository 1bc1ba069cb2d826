"""An encoder that takes no positions, and counts slots itself for its layers (Dia, Transformers 5.24)."""

import pytest
import torch

from rope_patch import patch
from rope_patch.mounting.parameters import learned_parameters
from tests.runs import assert_close
from tests.zoo.builder import specimen
from tests.zoo.checks import run, text

LENGTHS = 28, 19, 11


AT_BLOCKS = "deberta:max_distance=12,terms=[c2p],absolute_layers=1,num_positions=700"


@pytest.mark.parametrize(
    "spec", ["rerope:window=6", "yarn:factor=4", "logn:training_length=8", "alibi", "shaw", AT_BLOCKS]
)
def test_rows_with_pads_equal_each_row_alone(spec):
    rows = [text(length=length, seed=length) for length in LENGTHS]
    ids = torch.cat([torch.nn.functional.pad(row, (LENGTHS[0] - row.shape[1], 0)) for row in rows])
    model = specimen("dia").fresh()
    with patch(model, spec):
        for seed, weight in enumerate(learned_parameters(model).values()):  # some are zero at first
            weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
        padded = run(model, ids, attention_mask=(ids != 0).long())
        for row, found in zip(rows, padded, strict=True):
            assert_close(found[None, -row.shape[1] :], run(model, row))
