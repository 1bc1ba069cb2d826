import numpy as np
import pytest
import torch

from rope_patch import InvalidField, Learned


def native(n=200, dim=6, dtype=torch.float32):
    drawn = torch.randn(n, dim, generator=torch.Generator().manual_seed(1))
    return (torch.arange(dim) + (1 + torch.arange(dim)) * drawn).to(dtype)


def test_without_fields_it_is_the_table_of_the_checkpoint():
    assert torch.equal(Learned().embedding(native()), native())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_extension_keeps_every_row_and_adds_random_ones(dtype):
    found = Learned(extend=500).embedding(native(dtype=dtype))
    assert found.shape == (500, 6)
    assert found.dtype == dtype
    assert torch.equal(found[:200], native(dtype=dtype))
    assert len(found[200:].unique(dim=0)) == 300


def test_new_rows_are_spread_like_the_trained_ones_in_every_dimension():
    trained = native().double().numpy()
    new = Learned(extend=40_200).embedding(native())[200:].double().numpy()
    np.testing.assert_allclose(new.mean(0), trained.mean(0), atol=5 * trained.std(0).max() / 200)
    np.testing.assert_allclose(new.std(0), trained.std(0), rtol=0.02)


def test_a_fresh_table_has_none_of_the_old_rows():
    found = Learned(num_positions=50).embedding(native())
    assert found.shape == (50, 6)
    assert not (found[:, None] == native()[None]).all(-1).any()


def test_a_seed_means_the_same_rows_again():
    one, again, other = (Learned(extend=210, seed=seed).embedding(native()) for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    state = torch.get_rng_state()
    Learned(extend=210).embedding(native())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("extend", [1, 199, 200])
def test_an_extension_must_extend(extend):
    with pytest.raises(InvalidField, match=rf"extend={extend} is not allowed; the checkpoint has 200 positions"):
        Learned(extend=extend).embedding(native())


def test_replacing_and_keeping_exclude_each_other():
    with pytest.raises(InvalidField, match="num_positions=8 and extend=9 exclude each other"):
        Learned(num_positions=8, extend=9)


@pytest.mark.parametrize(
    ("field", "value"), [("num_positions", 0), ("extend", 0), ("extend", 1.5), ("extend", True), ("seed", -1)]
)
def test_fields_are_named(field, value):
    with pytest.raises(InvalidField, match=f"learned: {field}="):
        Learned(**{field: value})
