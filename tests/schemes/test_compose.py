"""What a composition is, by what its parts are."""

from typing import ClassVar

import pytest
import torch

from rope_patch import ALiBi, Compose, InvalidField, Learned, LogN, ReRoPE, RoPE, Scheme, SlotConflict, get_scheme
from rope_patch.schemes.base import COMPOSED
from rope_patch.schemes.compose import Combined
from rope_patch.typing import RotarySpec

FOLLOWING = {"slots", "brings_bias", "to_dict", "fields_for", "fit", "composition", "frequencies_on"}
"""What follows from `methods`, `fields` and `frequencies`, and what `reach` and a sweep ask the parts."""


def not_composed(cls: type[Scheme]) -> set[str]:
    """What a scheme of this class declares of itself and no composition of it would."""
    public = {name for name in {*vars(cls), *cls.__annotations__} if not name.startswith("_")}
    return public - vars(Compose).keys() - vars(Combined).keys() - FOLLOWING


def test_a_composition_answers_whatever_a_scheme_is_asked():
    assert not_composed(Scheme) == set()


def test_a_class_attribute_without_a_rule_would_be_missed():
    class Forgetful(Scheme):
        looks_ahead: ClassVar[bool] = False

        def looks(self) -> bool:
            return self.looks_ahead

    assert not_composed(Forgetful) == {"looks_ahead", "looks"}


def with_attribute(name, value):
    """RoPE that declares something else of itself."""
    return type("Saying", (RoPE,), {name: value})()


IF_ANY = [name for name, rule in COMPOSED.items() if rule.combine is any]


@pytest.mark.parametrize("name", IF_ANY)
def test_what_one_part_does_a_composition_does(name):
    assert not getattr(Compose(RoPE(), ReRoPE(6)), name)
    assert getattr(Compose(ReRoPE(6), with_attribute(name, True)), name)


def test_what_a_composition_does_if_any_part_does():
    assert set(IF_ANY) == {
        *("length_dependent", "learned_frequencies", "decays", "absolute", "causal_only", "by_layer"),
        *("every_block", "stateful", "breaks_graph", "reads_ids", "chooses_pairs", "regions_by_length"),
        *("by_document", "by_head"),
    }


def test_a_bias_is_linear_if_all_biases_are():
    assert Compose(RoPE(), ALiBi()).linear
    assert Compose(ALiBi(), ALiBi(slopes=(1.0,) * 4)).linear
    assert not get_scheme("alibi+sandwich").linear


def test_rows_are_kept_by_the_scheme_that_brings_them():
    assert Compose(Learned(extend=40), LogN()).keeps_rows
    assert not get_scheme("sinusoidal+logn").keeps_rows


def test_names_of_parameters_are_those_of_all_parts():
    assert get_scheme("alibi+t5").shared == ("slopes", "relative_attention_bias")
    assert get_scheme("alibi+complex_order").precise == get_scheme("complex_order").precise != ()


@pytest.mark.parametrize(
    ("spec", "regime"),
    [
        ("rerope:window=6+logn", "training-free"),
        ("logn+pi:factor=4", "fine-tune"),
        ("pi:factor=4+alibi", "from-scratch"),
        ("alibi+logn", "from-scratch"),
    ],
)
def test_a_composition_needs_what_its_most_demanding_part_needs(spec, regime):
    assert get_scheme(spec).regime == regime


@pytest.mark.parametrize("spec", ["yarn:factor=4+ntk:factor=4", "pi:factor=2+resonance+yarn:factor=4"])
def test_frequencies_have_one_owner(spec):
    with pytest.raises(SlotConflict, match="both own the slot 'frequencies'"):
        get_scheme(spec)


@pytest.mark.parametrize("spec", ["yarn:factor=4+giraffe_power:power=2+fope_cut", "giraffe_power:power=2+fope_cut"])
def test_what_refines_is_given_what_stands_before_it(spec):
    rotary = RotarySpec(64, 10000.0, 512)
    found, *parts = (get_scheme(spec), *get_scheme(spec).parts())
    expected = (parts.pop(0) if len(parts) == 3 else RoPE()).frequencies(rotary)
    for part in parts:
        expected = part.refine(expected, rotary)
    assert torch.equal(found.frequencies(rotary).inv_freq, expected.inv_freq)
    other = get_scheme("+".join(reversed(spec.split("+")))).frequencies(rotary).inv_freq
    assert not torch.equal(other, expected.inv_freq)  # cut before they are slowed


def test_where_an_owner_stands_among_what_refines_it_does_not_matter():
    rotary, lengths = RotarySpec(64, 10000.0, 512), torch.tensor([100, 2000])
    first, last = (get_scheme(spec) for spec in ("dynamic_ntk:factor=2+resonance", "resonance+dynamic_ntk:factor=2"))
    assert first.length_dependent
    assert not first.refines
    assert torch.equal(first.frequencies(rotary, lengths).inv_freq, last.frequencies(rotary, lengths).inv_freq)


@pytest.mark.parametrize(
    ("spec", "refines"),
    [("resonance", True), ("resonance+fope_cut+logn", True), ("rope+resonance", False), ("rerope:window=6", False)],
)
def test_a_composition_refines_where_no_part_owns_the_frequencies(spec, refines):
    assert get_scheme(spec).refines == get_scheme(f"{spec}+alibi").refines == refines


@pytest.mark.parametrize("other", ["logn", 3, None])
def test_what_is_no_scheme_is_not_added_to_one_and_the_line_to_write_is_said(other):
    with pytest.raises(InvalidField, match=r"is not a scheme; .*, or write all of it as text: patch\(model, 'rerope"):
        ReRoPE(window=5) + other
