import numpy as np
import pytest
import torch
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings

from rope_patch import InvalidField, Learned
from rope_patch.schemes.slots import Tokens
from tests.definition import Definition, no_rotation
from tests.schemes.entering import SHAPE, started

CASES = ["learned:num_positions=700"]
UNDRAWN = ["extend"]
"""Fields that no model of the random cases takes: only where there is a table it has rows to keep."""

DEFINITIONS = {
    "learned:num_positions=700": Definition(
        distance=no_rotation, embedding=lambda text: text.x + text.learned["position_embeddings"][text.m]
    )
}


def native(n=200, dim=6, dtype=torch.float32):
    drawn = torch.randn(n, dim, generator=torch.Generator().manual_seed(1))
    return (torch.arange(dim) + (1 + torch.arange(dim)) * drawn).to(dtype)


def test_without_fields_it_is_the_table_of_the_checkpoint():
    assert torch.equal(Learned().rows(native()), native())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_extension_keeps_every_row_and_adds_random_ones(dtype):
    found = Learned(extend=500).rows(native(dtype=dtype))
    assert found.shape == (500, 6)
    assert found.dtype == dtype
    assert torch.equal(found[:200], native(dtype=dtype))
    assert len(found[200:].unique(dim=0)) == 300


def test_new_rows_are_spread_like_the_trained_ones_in_every_dimension():
    trained = native().double().numpy()
    new = Learned(extend=40_200).rows(native())[200:].double().numpy()
    np.testing.assert_allclose(new.mean(0), trained.mean(0), atol=5 * trained.std(0).max() / 200)
    np.testing.assert_allclose(new.std(0), trained.std(0), rtol=0.02)


def test_a_fresh_table_has_none_of_the_old_rows():
    found = Learned(num_positions=50).rows(native())
    assert found.shape == (50, 6)
    assert not (found[:, None] == native()[None]).all(-1).any()


def test_a_seed_means_the_same_rows_again():
    one, again, other = (Learned(extend=210, seed=seed).rows(native()) for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    state = torch.get_rng_state()
    Learned(extend=210).rows(native())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("extend", [1, 199, 200])
def test_an_extension_must_extend(extend):
    with pytest.raises(InvalidField, match=rf"extend={extend} is not allowed; .* above the checkpoint's 200 positions"):
        Learned(extend=extend).rows(native())


def test_replacing_and_keeping_exclude_each_other():
    with pytest.raises(InvalidField, match="num_positions=8 and extend=9 exclude each other"):
        Learned(num_positions=8, extend=9)


# --- in a model that has no table ------------------------------------------------------------------------------------


def test_the_rows_are_added_as_bert_adds_them():
    config = BertConfig(vocab_size=31, hidden_size=8, max_position_embeddings=40, hidden_dropout_prob=0.0)
    theirs = BertEmbeddings(config).double().eval()
    ids = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [39, 12, 13, 0, 1, 0, 5]])
    words = theirs.word_embeddings(ids) + theirs.token_type_embeddings(torch.zeros_like(ids))
    ours = Learned().embedding(
        Tokens(words, positions, ids), {"position_embeddings": theirs.position_embeddings.weight}
    )
    torch.testing.assert_close(theirs.LayerNorm(ours), theirs(ids, position_ids=positions), rtol=0, atol=1e-12)


def test_the_table_starts_as_zeros_or_as_it_was_asked_for():
    assert torch.equal(started(Learned())["position_embeddings"], torch.zeros(SHAPE.training_length, SHAPE.hidden_size))
    drawn = started(Learned(num_positions=20_000, initial_std=0.02))["position_embeddings"]
    assert drawn.shape == (20_000, SHAPE.hidden_size)
    np.testing.assert_allclose(drawn.std(0).numpy(), 0.02, rtol=0.03)


def test_rows_that_are_not_there_cannot_be_kept():
    with pytest.raises(InvalidField, match=r"extend=64 is not allowed; .* no position table .* num_positions=64"):
        started(Learned(extend=64))


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_positions", 0), ("extend", 0), ("extend", 1.5), ("extend", True), ("seed", -1), ("initial_std", -0.1)],
)
def test_fields_are_named(field, value):
    with pytest.raises(InvalidField, match=f"learned: {field}="):
        Learned(**{field: value})
