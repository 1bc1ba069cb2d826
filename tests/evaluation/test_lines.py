from __future__ import annotations

import pytest

from rope_patch import LogN, PositionInterpolation, ReRoPE, RoPE, UnknownScheme, YaRN, get_scheme
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.lines import scheme_at


def test_plain_is_no_scheme():
    assert scheme_at("plain", 1024, 256) is None


@pytest.mark.parametrize(("length", "factor"), [(128, 1.0), (256, 1.0), (384, 1.5), (4096, 16.0)])
def test_auto_is_the_factor_that_the_length_needs(length, factor):
    assert scheme_at("pi:factor=auto", length, 256) == PositionInterpolation(factor)
    assert scheme_at("yarn:factor=auto,beta_fast=16", length, 256) == YaRN(factor, beta_fast=16)


@pytest.mark.parametrize("length", [256, 300, 1024, 4096])
@pytest.mark.parametrize("window", [32, 128])
def test_auto_beside_a_window_keeps_every_distance_within_the_training_length(length, window):
    group = scheme_at(f"self_extend:window={window},group_size=auto", length, 256).group_size
    assert window + (length - window) / group <= 256
    assert group == 1 or window + (length - window) / (group - 1) > 256
    factor = scheme_at(f"leaky_rerope:window={window},factor=auto", length, 256).factor
    assert window + (length - window) / factor == pytest.approx(256)


def test_parts_of_a_composition_and_plain_specs_are_read_as_ever():
    assert scheme_at("rerope:window=128+logn", 1024, 256) == get_scheme("rerope:window=128+logn")
    assert scheme_at("pi:factor=auto+logn", 512, 256).parts() == (PositionInterpolation(2.0), LogN())
    assert scheme_at("rerope:window=8", 512, 256) == ReRoPE(8)
    assert scheme_at("rope", 512, 256) == RoPE()


def test_wrong_specs_say_why():
    with pytest.raises(EvaluationError, match="attention_factor=auto: only some fields can be auto"):
        scheme_at("yarn:factor=2,attention_factor=auto", 512, 256)
    with pytest.raises(EvaluationError, match="needs a window below the training length of 256, not 256"):
        scheme_at("self_extend:group_size=auto,window=256", 512, 256)
    with pytest.raises(UnknownScheme, match="did you mean 'yarn'"):
        scheme_at("yran:factor=auto", 512, 256)
