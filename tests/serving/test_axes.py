"""A factor for each request on real vLLM where positions have three axes, and in hybrid models: `make vllm-check`.

The kernels of vLLM for gated delta nets on a CPU compute in bfloat16 alone: there a request has to be nearer to the
model with its factor than to those with others. The other families are compared in float32.
"""

import gc
import math
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding

import rope_patch
from rope_patch.models.config import checkpoint_of_config
from rope_patch.models.record import Record
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import load_config
from rope_patch.serving import vllm as plugin
from rope_patch.serving.factors import schemes_by_factor
from rope_patch.serving.vllm_admission import _prepare
from rope_patch.serving.vllm_served import Holder, Rows, Served, Tables, _served
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
    model = build(family, **SIZES, **_STATES, rope_parameters=HYBRIDS[family])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight += 3  # scores that depend on positions more than on what bfloat16 rounds
    return model.bfloat16().float()


def schemes_of(folder, spec):
    checkpoint = checkpoint_of_config(load_config(folder).get_text_config())
    return schemes_by_factor(spec, FACTORS, [checkpoint])


def exported(folder, model, spec="yarn:target=auto"):
    """The model in a folder that records a scheme for each factor."""
    model.save_pretrained(folder / "plain")
    export_checkpoint(folder / "plain", folder / "out", by_factor=schemes_of(folder / "plain", spec))
    return folder / "out"


def under(model, spec, factor, trained=L):
    """A handle on the model under the scheme of one factor."""
    name, *others = spec.replace("auto", str(factor * trained)).split("+")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rope_patch.RopePatchWarning)  # a factor of 1 changes nothing
        return rope_patch.patch(model, "+".join([name, *others]))


def engine(folder, **settings):
    return engine_of(folder, **{"max_model_len": 4 * L, "max_num_batched_tokens": 48, **TEXT_ONLY, **settings})


def prompts():
    return [tokens(length, seed=length)[0].tolist() for length in LENGTHS]


@pytest.fixture(autouse=True)
def one_at_a_time():
    gc.collect()
    destroy_model_parallel()


CASES = [(family, spec, True) for family in OF_IMAGES for spec in ("yarn", "ntk+logn", "self_extend")]


@pytest.mark.parametrize(("family", "name", "eager"), [*CASES, ("qwen3_vl", "ntk+logn", False)])
def test_texts_of_many_lengths_in_one_batch(tmp_path, family, name, eager):
    """Prompts are read in pieces of 48 tokens; once in compiled graphs."""
    model, texts = built(family), prompts()
    spec = name.replace("+", ":target=auto+") if "+" in name else f"{name}:target=auto"
    found = list(by_vllm(engine(exported(tmp_path, model, spec), enforce_eager=eager), texts))
    for ids, one in zip(texts, found, strict=True):
        with under(model, spec, LENGTHS[len(ids)]):
            assert_equal(by_this_library(model, [ids]), [one])


def test_blocks_of_a_prefix_are_shared_under_equal_factors_alone(tmp_path):
    """Blocks have 128 tokens here, so this model reads 256."""
    model = sized("qwen3_vl", **SIZES, rope_parameters=_INTERLEAVED, max_position_embeddings=256).float()
    served = engine(exported(tmp_path, model), enable_prefix_caching=True, max_model_len=1024)
    prompt = tokens(266)[0].tolist()

    def cached(factor):
        extra = {"rope_factor": factor}
        settings = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, extra_args=extra)
        output = served.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)[0]
        with under(model, "yarn:target=auto", factor, 256):
            (expected,) = by_this_library(model, [prompt])
        assert list(output.outputs[0].token_ids) == expected[1]
        return output.num_cached_tokens

    assert [cached(factor) for factor in (2, 4, 2, 4)] == [0, 0, 256, 256]


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
        assert right < min(by_factor.values()) / 3, (length, by_factor, right)


def test_images_are_refused_by_name_where_a_scheme_reads_one_axis(tmp_path):
    model = built("qwen2_vl")
    folder = exported(tmp_path, model, "self_extend:target=auto")
    config = engine(folder).llm_engine.vllm_config
    assert isinstance(vars(config.model_config)["_rope_patch_served"], Holder)
    config.model_config.multimodal_config.language_model_only = False
    with pytest.raises(
        rope_patch.UnsupportedModel, match=r"images are not supported.*start it with --language-model-only"
    ):
        _served(config)


@pytest.mark.parametrize(
    ("field", "sentence"),
    [("speculative_config", r"speculative decoding \(MTP too\)"), ("kv_transfer_config", "KV connectors")],
)
def test_what_does_not_know_of_factors_is_refused_by_name(tmp_path, field, sentence):
    folder = exported(tmp_path, built("qwen2_vl"))
    config = load_config(folder)
    model = SimpleNamespace(
        hf_config=config, hf_text_config=config.get_text_config(), model=str(folder), revision=None, max_model_len=4 * L
    )
    parts = {"use_v2_model_runner": False, "speculative_config": None, "kv_transfer_config": None, field: object()}
    parallel = SimpleNamespace(tensor_parallel_size=1)
    with pytest.raises(rope_patch.UnsupportedModel, match=f"a factor for each request in vLLM: {sentence}"):
        _prepare(lambda _: None, SimpleNamespace(model_config=model, parallel_config=parallel, **parts))
    assert Record.read(config.get_text_config()).per_request.keys() == set(FACTORS)


def axis_of(pair, sections, interleaved):
    """Which of time, row and column turns a pair of dimensions: by section, or every third pair in turn."""
    if not interleaved:
        return int((torch.tensor(sections).cumsum(0) <= pair).sum())
    return pair % 3 if pair < 3 * sections[pair % 3] else 0


def rotated(states, angles, scaling):
    """States `(tokens, heads * 32)` turned by angles `(tokens, 16)`, halves of a head being the parts of a number."""
    real, imaginary = states.double().unflatten(-1, (-1, 2, 16)).unbind(-2)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None] * scaling
    return torch.stack([turned.real, turned.imag], dim=-2).flatten(1)


@pytest.mark.parametrize("form", [_SECTIONS, _INTERLEAVED])
def test_tokens_of_images_turn_on_each_axis_by_the_factor_of_their_request(monkeypatch, form):
    """vLLM's own module, under two requests in one step: four tokens behind three others, and five behind 70."""
    family, interleaved = ("qwen3_vl", True) if "mrope_interleaved" in form else ("qwen2_vl", False)
    model = sized(family, **SIZES, rope_parameters=form).float()
    time = torch.tensor([3, 4, 4, 4, 60, 61, 61, 61, 64])
    row = torch.tensor([3, 4, 4, 5, 60, 61, 62, 63, 64])
    column = torch.tensor([3, 4, 5, 4, 60, 61, 61, 62, 64])
    positions, counted = torch.stack([time, row, column]), torch.tensor([3, 4, 5, 6, 70, 71, 72, 73, 74])
    parts = {2: slice(0, 4), 4: slice(4, 9)}
    states, frequencies = [], {}
    for factor in parts:
        handle = rope_patch.patch(model, f"yarn:factor={factor}+logn:training_length=8", mount="late")
        states.append({state.layer.index: state for state in handle.layer_states})
        handle.remove()
        with rope_patch.patch(model, "yarn", factor=factor):
            tables = model.get_decoder().rotary_emb
            frequencies[factor] = tables.inv_freq.double().clone(), tables.attention_scaling
    tables = Tables.of(states, [8 * L, 16 * L])
    rows = Rows(tables.starts, 4, 32, counts=True)
    rows.by_request[:2] = torch.tensor([0, 1])
    rows.lay_out(torch.tensor([0, 4, 9]), torch.tensor([7, 75]))
    served = Served(None, states, scores=False, tables=tables, rows=rows)
    monkeypatch.setattr(plugin, "served_of", lambda _: served)
    plugin.register()
    engine_config = SimpleNamespace(model_config=SimpleNamespace(uses_mrope=True, use_mla=False))
    with set_current_vllm_config(VllmConfig()):
        monkeypatch.setattr(plugin, "get_current_vllm_config", lambda: engine_config)
        settings = {"mrope_section": form["mrope_section"], "mrope_interleaved": interleaved}
        rotary = MRotaryEmbedding(32, 32, L, 10000.0, True, torch.float32, **settings)
        of_the_tower = RotaryEmbedding(32, 32, L, 10000.0, True, torch.float32)
    assert isinstance(rotary, plugin.Rotary)
    assert of_the_tower.served is None
    assert of_the_tower.cos_sin_cache.shape[0] == L
    query, key = torch.randn(9, 4 * 32), torch.randn(9, 2 * 32)
    found = rotary(positions, query.clone(), key.clone())
    axes = [axis_of(pair, form["mrope_section"], interleaved) for pair in range(16)]
    for factor, part in parts.items():
        inv_freq, scaling = frequencies[factor]
        angles = positions[axes][:, part].T * inv_freq
        scale = (counted[part] + 1).double().log().div(math.log(8)).clamp(min=1)[:, None]
        torch.testing.assert_close(
            found[0][part].double(), rotated(query[part], angles, scaling) * scale, atol=1e-4, rtol=0
        )
        torch.testing.assert_close(found[1][part].double(), rotated(key[part], angles, scaling), atol=1e-4, rtol=0)


def test_a_kernel_that_skips_the_rotary_module_does_not_take_its_table():
    """On a GPU, vLLM's kernel for hybrid models of text reads the table itself; it wants a half dtype."""
    rotary = plugin.Rotary.__new__(type("Own", (plugin.Rotary,), {}))
    torch.nn.Module.__init__(rotary)
    rotary.dtype = torch.bfloat16
    rotary.register_buffer("cos_sin_cache", torch.zeros(4, 8), persistent=False)
    rotary._read(Tables(torch.zeros(16, 8), None, torch.zeros(1, dtype=torch.long)))
    assert rotary.dtype == torch.float32
