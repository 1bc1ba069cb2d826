from __future__ import annotations

import pytest

from rope_patch import InvalidField, LogN, PositionInterpolation, ReRoPE, RoPE, T5Bias, UnknownScheme, YaRN, get_scheme
from rope_patch.evaluation.scheme_specs import display_name, scheme_at
from rope_patch.schemes import Checkpoint, list_schemes

TRAINED = [Checkpoint(training_length=256, num_heads=4, max_length=256)]


def test_plain_is_no_scheme():
    assert scheme_at("plain", 1024, TRAINED) is None


@pytest.mark.parametrize(("length", "factor"), [(128, 1.0), (256, 1.0), (384, 1.5), (4096, 16.0)])
def test_auto_is_the_length_that_is_measured(length, factor):
    assert scheme_at("pi:target=auto", length, TRAINED) == PositionInterpolation(factor)
    assert scheme_at("yarn:target=auto,beta_fast=16", length, TRAINED) == YaRN(factor, beta_fast=16)
    assert scheme_at("t5:target=auto", length, TRAINED) == T5Bias(interpolation=factor)


@pytest.mark.parametrize("length", [256, 300, 1024, 4096])
@pytest.mark.parametrize("window", [32, 128])
def test_auto_beside_a_window_keeps_every_distance_within_the_training_length(length, window):
    group = scheme_at(f"self_extend:window={window},target=auto", length, TRAINED).group_size
    assert window + (length - window) / group <= 256
    assert group == 1 or window + (length - window) / (group - 1) > 256
    factor = scheme_at(f"leaky_rerope:window={window},target=auto", length, TRAINED).factor
    assert window + (length - window) / factor == pytest.approx(256)


def test_parts_of_a_composition_and_plain_specs_are_read_as_ever():
    assert scheme_at("rerope:window=128+logn", 1024, TRAINED) == get_scheme("rerope:window=128+logn")
    assert scheme_at("pi:target=auto+logn", 512, TRAINED).parts() == (PositionInterpolation(2.0), LogN())
    assert scheme_at("rerope:window=8", 512, TRAINED) == ReRoPE(8)
    assert scheme_at("rope", 512) == RoPE()


def test_a_line_is_checked_without_a_model():
    assert str(scheme_at("yarn:target=auto", 512)) == "yarn:target=512"
    with pytest.raises(UnknownScheme, match="did you mean 'yarn'"):
        scheme_at("yran:target=auto", 512)
    with pytest.raises(InvalidField, match="target=512 means nothing to rope"):
        scheme_at("rope:target=auto", 512)


def test_wrong_specs_say_why():
    for spec in ("yarn:factor=auto", "self_extend:group_size=auto,window=128"):
        with pytest.raises(
            InvalidField, match=r"='auto' is not allowed; write target=8192.* or target=auto where lengths are measured"
        ):
            scheme_at(spec, 512, TRAINED)
    with pytest.raises(InvalidField, match=r"attention_factor='auto' is not allowed; .* a number above 0"):
        scheme_at("yarn:factor=2,attention_factor=auto", 512, TRAINED)
    with pytest.raises(InvalidField, match=r"window=256 .* below the training length of 256"):
        scheme_at("self_extend:target=auto,window=256", 512, TRAINED)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("plain", "plain checkpoint"),
        ("window", "sliding window"),
        ("window:window=64", "sliding window, w = 64"),
        ("pi:target=auto", "PI"),
        ("ntk:factor=8.0", "NTK, factor = 8"),
        ("rerope:window=128+logn", "ReRoPE, w = 128, log-n"),
        ("self_extend:group_size=11,window=128", "Self-Extend, group_size = 11, w = 128"),
        ("leaky_rerope:target=auto", "Leaky ReRoPE"),
        ("logn:form=llama4", "log-n, form = llama4"),
        ("of_a_notebook:a=1", "of_a_notebook, a = 1"),
        ("layers:[0-2=nope;rest=none]", "layers:[0-2=nope;rest=none]"),
        (YaRN(4), "YaRN, factor = 4"),
        (get_scheme("yarn", target=512), "YaRN, target = 512"),
    ],
)
def test_a_line_has_one_name_for_people(line, name):
    assert display_name(line) == name


def test_no_two_schemes_have_one_name():
    assert len({display_name(name) for name in list_schemes()}) == len(list_schemes())
