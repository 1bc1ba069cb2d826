"""A factor for each request on real vLLM where positions have three axes, and in hybrid models: `make vllm-check`.

The kernels of vLLM for gated delta nets on a CPU compute in bfloat16 alone: there a request has to be nearer to the
model with its factor than to those with others. The other families are compared in float32.
"""

import gc
import warnings

import pytest
import torch

import rope_patch
from rope_patch.models.config import checkpoint_of_config
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import load_config
from rope_patch.serving.factors import schemes_by_factor
from tests.families import TRAINING_LENGTH as L
from tests.families import build
from tests.models.mrope_families import sized
from tests.runs import tokens
from tests.serving import images  # noqa: F401
from tests.serving.engines import NEW, assert_equal, by_this_library, by_vllm, engine_of, vllm

FACTORS = (1, 2, 4)
LENGTHS = {5: 1, L - NEW: 1, L - NEW + 1: 2, 2 * L - NEW: 2, 2 * L - NEW + 1: 4, 90: 4, 4 * L - NEW: 4}
"""The factor of each length of a prompt."""

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # CPU kernels have 32
_ENTRY = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_ENTRY, "mrope_section": [4, 6, 6]}
_INTERLEAVED = {**_ENTRY, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
_STATES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # CPU kernels have no others
_PARTIAL = {**_ENTRY, "partial_rotary_factor": 0.5}

OF_IMAGES = {"qwen2_vl": _SECTIONS, "qwen2_5_vl": _SECTIONS, "qwen3_vl": _INTERLEAVED}
HYBRIDS = {
    "qwen3_5_text": {**_PARTIAL, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "qwen3_next": _PARTIAL,
}
TEXT_ONLY = {"language_model_only": True, "skip_tokenizer_init": True}


def built(family):
    if family in OF_IMAGES:
        return sized(family, **SIZES, rope_parameters=OF_IMAGES[family]).float()
    return build(family, **SIZES, **_STATES, rope_parameters=HYBRIDS[family]).float()


def schemes_of(folder, spec):
    checkpoint = checkpoint_of_config(load_config(folder).get_text_config())
    return schemes_by_factor(spec, FACTORS, [checkpoint])


def exported(folder, model, spec="yarn:target=auto"):
    """The model in a folder that records a scheme for each factor."""
    model.save_pretrained(folder / "plain")
    export_checkpoint(folder / "plain", folder / "out", by_factor=schemes_of(folder / "plain", spec))
    return folder / "out"


def under(model, spec, factor):
    """A handle on the model under the scheme of one factor."""
    name, *others = spec.replace("auto", str(factor * L)).split("+")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rope_patch.RopePatchWarning)  # a factor of 1 changes nothing
        return rope_patch.patch(model, "+".join([name, *others]))


def engine(folder, **settings):
    return engine_of(folder, **{"max_model_len": 4 * L, "max_num_batched_tokens": 48, **TEXT_ONLY, **settings})


def prompts():
    return [tokens(length, seed=length)[0].tolist() for length in LENGTHS]


@pytest.fixture(autouse=True)
def one_at_a_time():
    from vllm.distributed.parallel_state import destroy_model_parallel

    gc.collect()
    destroy_model_parallel()


@pytest.mark.parametrize("spec", ["yarn:target=auto", "ntk:target=auto+logn", "self_extend:target=auto"])
@pytest.mark.parametrize("family", OF_IMAGES)
def test_texts_of_many_lengths_in_one_batch(tmp_path, family, spec):
    """Prompts are read in pieces of 48 tokens."""
    model, texts = built(family), prompts()
    found = list(by_vllm(engine(exported(tmp_path, model, spec)), texts))
    for ids, one in zip(texts, found, strict=True):
        with under(model, spec, LENGTHS[len(ids)]):
            assert_equal(by_this_library(model, [ids]), [one])


def test_blocks_of_a_prefix_are_shared_under_equal_factors_alone(tmp_path):
    model, prompt = built("qwen3_vl"), tokens(100)[0].tolist()
    served = engine(exported(tmp_path, model), enable_prefix_caching=True)
    block = served.llm_engine.vllm_config.cache_config.block_size

    def cached(factor):
        extra = {"rope_factor": factor}
        settings = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, extra_args=extra)
        output = served.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)[0]
        with under(model, "yarn:target=auto", factor):
            (expected,) = by_this_library(model, [prompt])
        assert list(output.outputs[0].token_ids) == expected[1]
        return output.num_cached_tokens

    whole = 99 // block * block
    assert block < 99
    assert [cached(factor) for factor in (4, 4)] == [0, whole]
    with pytest.raises(vllm.exceptions.VLLMValidationError, match="under rope_factor=2"):
        cached(2)
    prompt = prompt[:40]
    assert [cached(factor) for factor in (2, 2, 4)] == [0, 39 // block * block, 39 // block * block]


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_rotate_each_request_by_its_factor(tmp_path, family):
    model, texts = built(family), prompts()
    served = engine(exported(tmp_path, model), dtype="bfloat16")
    found = list(by_vllm(served, texts))
    distances = {}
    for factor in FACTORS:
        with under(model, "yarn:target=auto", factor):
            expected = list(by_this_library(model, texts))
        distances[factor] = [
            float((one[0] - other[0]).square().mean().sqrt()) for one, other in zip(expected, found, strict=True)
        ]
    for place, length in enumerate(LENGTHS):
        by_factor = {factor: of_texts[place] for factor, of_texts in distances.items()}
        right = by_factor.pop(LENGTHS[length])
        assert right < 0.03
        assert right < min(by_factor.values()) / 2, (length, by_factor, right)
