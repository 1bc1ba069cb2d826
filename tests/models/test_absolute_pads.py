"""Tables of positions in left-padded batches without `position_ids`: under a scheme tokens are counted, not pads."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from rope_patch import patch
from rope_patch.models.absolute import read, recognises
from tests.models.absolute_families import CAPACITY, CONFIGS, DECODERS, build, outputs, tokens

families = pytest.mark.parametrize("family", CONFIGS)


def left_padded(model, *lengths):
    """Texts, and one batch of them with pads on the left, with its mask."""
    rows = [tokens(length, seed=length) for length in lengths]
    batch = torch.full((len(rows), max(lengths)), model.config.pad_token_id)
    for each, row in zip(batch, rows, strict=True):
        each[-row.shape[1] :] = row[0]
    return rows, batch, (batch != model.config.pad_token_id).long()


@families
@pytest.mark.parametrize("spec", ["hierarchical", "sinusoidal", "learned:num_positions=23"])
def test_tokens_are_counted_and_left_pads_are_not(family, spec):
    model = build(family)
    rows, batch, mask = left_padded(model, 2 * CAPACITY, CAPACITY + 3, 5)
    with patch(model, spec):
        found = outputs(model, batch, attention_mask=mask)
        for each, row in zip(found, rows, strict=True):
            torch.testing.assert_close(each[-row.shape[1] :], outputs(model, row)[0], rtol=0, atol=2e-5)
        assert torch.equal(outputs(model, batch, attention_mask=torch.ones_like(mask)), outputs(model, batch))
        if family in DECODERS:
            given = {"past_key_values": None}
            for stop, part in zip((9, 15, 16), batch.split([9, 6, 1], dim=1), strict=True):
                step = model(input_ids=part, attention_mask=mask[:, :stop], **given)
                given = {"past_key_values": step.past_key_values}
            torch.testing.assert_close(step.logits[:, -1], found[:, -1], rtol=0, atol=2e-5)


@families
def test_of_a_text_without_left_pads_no_bit_changes(family):
    model = build(family)
    _, batch, mask = left_padded(model, CAPACITY - 1, 5, 3)
    right = {"input_ids": batch.flip(-1), "attention_mask": mask.flip(-1)}
    before = model(**right)[0]
    with patch(model, "hierarchical"):
        assert torch.equal(model(**right)[0], before)


FIRST = {
    "bert": 0,
    "electra": 0,
    "gpt2": 0,
    "roberta": None,
    "opt": None,
    "distilbert": 0,
    "yoso": 2,
    "camembert": None,
}
"""What position the first token of a text has; None where the model counts tokens by itself, by ids or by the mask."""


@pytest.mark.parametrize("family", FIRST)
def test_how_a_model_counts_is_measured(family):
    config = CONFIGS.get(family, {**CONFIGS["bert"], "pad_token_id": 1})
    (stack,) = filter(recognises, AutoModel.from_config(CONFIG_MAPPING[family](**config)).eval().modules())
    assert read(stack).absolute.first == FIRST[family]


@pytest.mark.parametrize("family", ["distilbert", "albert", "mpnet", "biogpt"])
def test_families_without_an_entry_here_count_tokens_or_are_left_alone(family):
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIG_MAPPING[family](**CONFIGS["bert"], embedding_size=32)).eval()
    (stack,) = filter(recognises, model.modules())
    rows, batch, mask = left_padded(model, CAPACITY - 2, 4, 3)
    with patch(model, "hierarchical"):
        found = outputs(model, batch, attention_mask=mask)
    if read(stack).absolute.first is not None:
        for each, row in zip(found, rows, strict=True):
            torch.testing.assert_close(each[-row.shape[1] :], outputs(model, row)[0], rtol=0, atol=2e-5)
    else:
        assert torch.equal(found, outputs(model, batch, attention_mask=mask))
