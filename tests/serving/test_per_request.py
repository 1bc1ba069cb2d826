"""A factor for each request on real vLLM, from a folder that records several: `make vllm-check`."""

import gc
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.models.config import checkpoint_of_config
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import default_checkpoint, load_config
from rope_patch.serving.factors import schemes_by_factor
from tests.serving.engines import NEW, L, assert_equal, by_this_library, by_vllm, engine_of, saved, text, vllm

FACTORS = (1, 2, 4)
LENGTHS = {L // 2: 1, L - NEW: 1, L - NEW + 1: 2, 2 * L - NEW: 2, 3 * L: 4, 40: 1, 4 * L - NEW: 4}
"""The factor of each length of a prompt."""

KINDS = {"yarn": True, "ntk+logn": False, "self_extend": False, "leaky_rerope": True}
"""Schemes with whether they are served in compiled graphs."""


def exported(folder, spec):
    spec = "+".join([f"{spec.split('+')[0]}:target=auto", *spec.split("+")[1:]])
    checkpoint = checkpoint_of_config(load_config(default_checkpoint()))
    export_checkpoint(default_checkpoint(), folder, by_factor=schemes_by_factor(spec, FACTORS, [checkpoint]))
    return folder


def under(spec, factor):
    """A model under the scheme of one factor."""
    spec = "+".join([f"{spec.split('+')[0]}:target={factor * L}", *spec.split("+")[1:]])
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rope_patch.RopePatchWarning)  # a factor of 1 changes nothing
        rope_patch.patch(model, spec)
    return model


@pytest.fixture(scope="module", params=KINDS)
def served(request, tmp_path_factory):
    """An engine that shares prefixes and reads prompts in chunks of 320 tokens, and models by factor."""
    gc.collect()
    folder = exported(tmp_path_factory.mktemp("served") / "folder", request.param)
    settings = {"enable_prefix_caching": True, "max_num_batched_tokens": 320, "max_model_len": 4 * L}
    engine = engine_of(folder, enforce_eager=not KINDS[request.param], **settings)
    return engine, {factor: under(request.param, factor) for factor in FACTORS}


def test_requests_of_many_lengths_run_under_the_smallest_factor_that_covers_them(served):
    engine, models = served
    texts = [text(length) for length in LENGTHS]
    found = list(by_vllm(engine, texts))
    for ids, one in zip(texts, found, strict=True):
        assert_equal(by_this_library(models[LENGTHS[len(ids)]], [ids]), [one])


@pytest.mark.parametrize("factor", [2, 4.0])
def test_a_request_runs_under_the_factor_that_it_asks_for(served, factor):
    engine, models = served
    texts = [text(L - NEW)]  # beyond the windows of 128
    expected = list(by_this_library(models[factor], texts))
    assert_equal(expected, by_vllm(engine, texts, extra_args={"rope_factor": factor}))
    others = next(by_this_library(models[1], texts))[0]
    assert (others - expected[0][0]).abs().max() > 1e-2  # they can be told apart


def test_blocks_of_a_prefix_are_shared_under_equal_factors_alone(served):
    engine, models = served
    prompt = text(L + 200)[190:]  # a text that no other test has read

    def cached(factor, length):
        extra = {"rope_factor": factor}
        settings = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, extra_args=extra)
        output = engine.generate([{"prompt_token_ids": prompt[:length]}], settings, use_tqdm=False)[0]
        (expected,) = by_this_library(models[factor], [prompt[:length]])
        assert list(output.outputs[0].token_ids) == expected[1]
        return output.num_cached_tokens

    assert cached(2, 266) == 0
    assert cached(4, 266) == 0
    assert cached(2, 266) == 256
    assert cached(2, 140) == 128
    assert cached(4, 266) == 256


@pytest.mark.parametrize(
    ("length", "factor", "sentence"),
    [
        (40, 3, "rope_factor=3: 1, 2, 4 are allowed"),
        (40, "4", "rope_factor='4': a number is allowed"),
        (40, True, "rope_factor=True: a number is allowed"),
        (40, [4], r"rope_factor=\[4\]: a number is allowed"),
        (40, float("nan"), "rope_factor=nan: 1, 2, 4 are allowed"),
        (L, 1, "256 tokens of prompt and answer are allowed under rope_factor=1"),
    ],
)
def test_a_factor_that_a_request_cannot_have_is_a_400(served, length, factor, sentence):
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=sentence) as refusal:
        next(by_vllm(served[0], [text(length)], extra_args={"rope_factor": factor}))
    assert create_error_response(refusal.value).error.code == 400


def test_it_is_the_engine_of_a_folder_with_that_factor(tmp_path):
    """vLLM's own YaRN, from `rope_parameters`."""
    saved(tmp_path / "two", "yarn:factor=2")
    texts = [text(length) for length in (L // 2, 2 * L - NEW)]
    expected = list(by_vllm(engine_of(tmp_path / "two", max_model_len=2 * L), texts))
    gc.collect()
    engine = engine_of(exported(tmp_path / "many", "yarn"), max_model_len=4 * L)
    assert_equal(expected, by_vllm(engine, texts, extra_args={"rope_factor": 2}))


def test_an_engine_without_factors_takes_no_notice(tmp_path):
    """Also after one with factors in the same process."""
    model = saved(tmp_path, "yarn:factor=4")
    texts = [text(L // 2)]
    engine = engine_of(tmp_path, max_model_len=4 * L)
    assert_equal(by_this_library(model, texts), by_vllm(engine, texts, extra_args={"rope_factor": 1}))


def test_the_other_model_runner_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", True)
    with pytest.raises(rope_patch.UnsupportedModel, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        engine_of(exported(tmp_path / "folder", "yarn"))
