"""What holds for every scheme by what it declares of itself."""

import itertools
import pickle

import pytest
import torch

from rope_patch import Compose, get_scheme, list_schemes, patch
from rope_patch.attention import behind_cache
from rope_patch.schemes import scheme_class, scheme_from_dict
from tests.cases import ALL, CASES, REPRESENTATIVE
from tests.families import LLAMA_AND_SCALED, RUN, TRAINING_LENGTH, build
from tests.runs import assert_close, follows_the_length, logits, tokens, usable_length


def test_every_registered_scheme_has_a_case():
    assert sorted(CASES) == list_schemes()
    assert all(get_scheme(spec).name == name for name, spec in CASES.items())


@pytest.mark.parametrize("name", list_schemes())
def test_every_scheme_says_what_it_is_and_where_it_is_from(name):
    cls = scheme_class(name)
    assert cls.name == name
    assert cls.equation
    assert hasattr(cls, "source"), f"{name} needs source = Source(title, year, link) in its class"
    assert cls.source.title
    assert cls.source.link.startswith("https://")
    assert 2016 <= cls.source.year <= 2030
    assert cls.regime in ("training-free", "fine-tune", "from-scratch")
    assert len(cls.__doc__) > 60
    assert not cls.__doc__.startswith(f"{cls.__name__}(")  # what a dataclass writes when nobody else did


BIASES = [scheme for scheme in map(get_scheme, CASES.values()) if "bias" in scheme.methods and not scheme.learns]


@pytest.mark.parametrize("scheme", BIASES, ids=str)
def test_a_bias_that_only_hides_pairs_declares_it(scheme):
    values = scheme.bias(torch.arange(100), 4)
    hidden = values.isneginf()
    only = bool(hidden.any()) and bool((hidden | (values == 0)).all())
    assert not only or scheme.only_masks, f"{scheme.name} only hides pairs: declare only_masks = True in its class"


@pytest.mark.parametrize("spec", ALL)
def test_schemes_survive_dict_string_and_pickle(spec):
    scheme = get_scheme(spec)
    assert scheme_from_dict(scheme.to_dict()) == scheme
    assert get_scheme(str(scheme)) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert hash(pickle.loads(pickle.dumps(scheme))) == hash(scheme)


@pytest.mark.parametrize("spec", ALL)
def test_a_composition_of_one_is_that_scheme(llama, spec):
    with patch(llama, spec):
        expected = logits(llama, tokens())
    with patch(llama, Compose(get_scheme(spec))):
        assert torch.equal(logits(llama, tokens()), expected)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("spec", REPRESENTATIVE)
def test_a_later_token_changes_no_earlier_logit(model, spec):
    ids = tokens(rows=2)
    changed = ids.clone()
    changed[:, 25] = changed[:, 25] % 96 + 1
    with patch(model, spec):
        before, after = logits(model, ids), logits(model, changed)
    assert_close(after[:, :25], before[:, :25], 1e-6)
    assert (after[:, 25:] - before[:, 25:]).abs().max() > 1e-3


@pytest.mark.parametrize(("family", "spec"), LLAMA_AND_SCALED)
def test_only_absolute_and_length_dependent_schemes_notice_a_shift(model, spec, monkeypatch):
    # shorter than the training length, so that every scheme changes when the text moves beyond it
    ids, follows = tokens(TRAINING_LENGTH - 1), follows_the_length(model, spec)
    positions = torch.arange(ids.shape[1])[None]
    for mode, dense in (("auto", 2**18), ("auto", 0), ("oracle", 0)):
        monkeypatch.setattr(behind_cache, "SMALL", dense)
        with patch(model, spec, attention=mode):
            # a multiple of every group size: groups are counted from position zero
            shifted = logits(model, ids, position_ids=positions + 48)
            difference = (shifted - logits(model, ids, position_ids=positions)).abs().max()
        if get_scheme(spec).absolute or follows:
            assert difference > 1e-3, (mode, dense)
        else:
            assert difference < 5e-5, (mode, dense)


@pytest.mark.parametrize("spec", ALL)
def test_finite_at_four_times_the_training_length(llama, spec):
    with patch(llama, spec):
        assert logits(llama, tokens(4 * TRAINING_LENGTH)).isfinite().all()


@pytest.mark.parametrize(
    ("family", "spec"), [*LLAMA_AND_SCALED, *itertools.product(["qwen3", "cohere"], REPRESENTATIVE)]
)
def test_bfloat16_is_close_to_float32(model, spec, family):
    ids = tokens(usable_length(model, spec))
    with patch(model, spec):
        expected = logits(model, ids)
    model.bfloat16()
    plain = (logits(model, ids).float() - logits(build(family), ids)).abs().mean()
    with patch(model, spec):
        found = logits(model, ids)
    assert found.dtype == torch.bfloat16
    # as far off as the plain model is under bfloat16, give or take
    assert (found.float() - expected).abs().mean() < 3 * plain


@pytest.mark.parametrize("spec", ALL)
def test_float64_is_float32_with_more_digits(llama, spec):
    llama.double()
    with patch(llama, spec):
        found = logits(llama, tokens())
    assert found.dtype == torch.float64
    with patch(build(), spec) as handle:
        assert_close(found.float(), logits(handle.model, tokens()), 1e-4)
