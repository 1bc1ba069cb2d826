"""Stock vLLM on a CPU under schemes that it does not know, against this library: `make vllm-check`."""

import gc

import pytest
import torch
from transformers import AutoConfig

import rope_patch
from benchmarks.readers import check_vectors, vllm_tables
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import default_checkpoint
from tests.families import build
from tests.runs import tokens
from tests.serving.engines import (
    LENGTHS,
    NEW,
    L,
    assert_same,
    by_spec,
    by_this_library,
    engine_of,
    keep,
    saved,
    text,
    vllm,
)

SPECS = [
    "logn",
    "giraffe:cutoff_length=512",
    "rerope:window=128",
    "rerope:window=128+logn",
    "rerope:window=2000",
    "leaky_rerope:window=64,factor=8",
    "self_extend:group_size=8,window=128",
    "dca:chunk_size=192",
    "dpe:window=128,groups=[2,8,4,16]",
    "lm_infinite:local_window=200",
    "alibi",
    "rope+alibi",
    "dynamic_ntk:length=2048",
    "yarn:factor=4+rerope:window=96",
    "layers:[:3=rerope:window=64+logn:training_length=64;rest=rerope:window=160+logn:training_length=256]",
]

STATIC = ["pi:factor=4", "ntk:factor=4", "abf:base=160000", "yarn:factor=4"]
"""What vLLM reads in `rope_parameters` itself."""


@pytest.fixture(scope="module")
def texts():
    return [text(length) for length in LENGTHS]


@pytest.fixture(autouse=True)
def one_at_a_time():
    """What an earlier engine left behind would take the next one with it: the engine, after a failure, and process
    groups without those that only some models need.
    """
    from vllm.distributed.parallel_state import destroy_model_parallel

    gc.collect()
    destroy_model_parallel()


@pytest.mark.parametrize("spec", SPECS)
def test_a_saved_folder_is_served_under_its_scheme(tmp_path, texts, spec):
    """Prompts from L/2 to 8 L in one batch, read in chunks of 640 tokens."""
    model = saved(tmp_path, spec)
    assert_same(engine_of(tmp_path), model, texts)


@pytest.mark.parametrize("spec", ["logn", "rerope:window=128+logn", "alibi"])
def test_compiled_graphs_are_the_same(tmp_path, texts, spec):
    """Without --enforce-eager: attention is an operator of vLLM that graphs do not look into."""
    model = saved(tmp_path, spec)
    assert_same(engine_of(tmp_path, enforce_eager=False), model, texts)


@pytest.mark.parametrize("spec", ["logn", "giraffe:cutoff_length=512", "dynamic_ntk:length=2048", "yarn:factor=4+logn"])
def test_static_schemes_leave_attention_to_vllm(tmp_path, spec):
    from rope_patch.serving.vllm_served import Tables, _states_of

    saved(tmp_path, spec)
    assert Tables.of(_states_of(str(tmp_path), None), [L]) is not None


def test_string_within_what_it_can_read(tmp_path, texts):
    """Beyond, its positions were never trained, and rounding grows from layer to layer."""
    model = saved(tmp_path, "string:shift=64")
    assert_same(engine_of(tmp_path), model, texts[:3])


@pytest.mark.parametrize("family", ["qwen3", "phi3", "mistral"])
def test_other_layouts(tmp_path, family):
    """Norms of queries and keys, and fused projections."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 64}
    model = build(family, **sizes).float()
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = None
    rope_patch.patch(model, "rerope:window=24+logn:training_length=64")
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, skip_tokenizer_init=True)
    assert_same(engine, model, [tokens(length, seed=length)[0].tolist() for length in (40, 200)])


def test_blocks_of_a_shared_prefix(tmp_path, texts):
    model = saved(tmp_path, "rerope:window=128")
    engine = engine_of(tmp_path, enable_prefix_caching=True)
    assert_same(engine, model, texts)
    settings = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    again = engine.generate([{"prompt_token_ids": ids} for ids in texts], settings, use_tqdm=False)
    assert again[-1].num_cached_tokens > L
    assert [list(output.outputs[0].token_ids) for output in again] == [new for _, new in by_this_library(model, texts)]


def test_long_decoding_across_the_edge_of_the_window(tmp_path, texts):
    model, prompt = saved(tmp_path, "rerope:window=64"), texts[0][:20]
    settings = vllm.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    output = engine_of(tmp_path).generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)[0]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False, eos_token_id=-1)
    assert list(output.outputs[0].token_ids) == expected[0, 20:].tolist()


@pytest.mark.parametrize("spec", [None, *STATIC])
def test_what_vllm_reads_itself_is_left_to_it(tmp_path, texts, spec):
    from rope_patch.serving.vllm_served import _states_of

    model = saved(tmp_path, spec)
    assert _states_of(str(tmp_path), None) == []
    texts = texts[:1] if spec is None else texts[:4]
    assert_same(engine_of(tmp_path, hf_overrides={"max_position_embeddings": 8 * L}), model, texts)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("fox", "content biases|learned parameters"),
        ("sinusoidal", "positions that are added at the input"),
        ("rope+shaw", "learned parameters"),
        ("layers:[0=rerope:window=64;rest=none]", "it does not change layers.1.self_attn, layers.2"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, spec, sentence):
    from rope_patch.serving.vllm_served import _states_of

    saved(tmp_path, spec)
    with pytest.raises(rope_patch.UnsupportedModel, match=sentence):
        _states_of(str(tmp_path), None)


FACTORS = f"[{','.join(f'{1 + pair / 8:g}' for pair in range(32))}]"
LISTS = [
    "mrrope:factor=4",
    "yarn:factor=4,attention_factor=1.3",
    f"longrope:short_factor={FACTORS},long_factor={FACTORS},factor=4,attention_factor=1.14",  # as a search finds it
    "yarn:factor=4+learned_rope:per_layer=false",
]


@pytest.mark.parametrize("spec", LISTS)
def test_exported_lists_need_no_plugin(tmp_path, texts, spec, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    source, model = default_checkpoint(), by_spec(spec)
    if "learned" in spec:
        with torch.no_grad():
            model.model.rope_patch.log_speed.copy_(torch.linspace(0.1, -0.3, 32))
        source = tmp_path / "trained"
        keep(model, source)
    scheme = None if "learned" in spec else spec
    export_checkpoint(source, tmp_path / "out", scheme, length=LENGTHS[-1] + NEW, readers=["vllm"])
    assert_same(engine_of(tmp_path / "out"), model, texts[:4])


def test_lists_by_layer_type(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    model = build("gemma3", head_dim=32).float()
    model.save_pretrained(tmp_path / "plain")
    export_checkpoint(tmp_path / "plain", tmp_path / "out", "mrrope:factor=4", length=256, readers=["vllm"])
    engine = engine_of(tmp_path / "out", skip_tokenizer_init=True, max_model_len=200)
    with rope_patch.patch(model, "mrrope:factor=4"):
        assert_same(engine, model, [tokens(length, seed=length)[0].tolist() for length in (20, 120)])


def test_its_own_functions_are_held_to_the_vectors():
    """What differs is in docs/serving.md: vLLM has one list, and one base, for texts of all lengths."""
    found = dict(check_vectors().deviations(vllm_tables))
    differing = {name for name, worst in found.items() if isinstance(worst, str) or max(worst) > 1e-4}
    unequal_lists = {"longrope", "longrope_attention_factor", "longrope_factor_missing", "rope_scaling_longrope"}
    assert differing == unequal_lists | {"dynamic", "dynamic_factor_1", "proportional_factor"}


def test_an_fp8_cache_is_refused(tmp_path):
    saved(tmp_path, "rerope:window=64")
    with pytest.raises(rope_patch.UnsupportedModel, match="an fp8 cache is not supported"):
        engine_of(tmp_path, kv_cache_dtype="fp8")


def test_speculative_decoding_is_refused(tmp_path):
    saved(tmp_path, "rerope:window=64")
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(rope_patch.UnsupportedModel, match="speculative decoding is not supported"):
        engine_of(tmp_path, speculative_config=drafts)


def test_mla_reads_rope_parameters_and_refuses_other_schemes(tmp_path):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}  # vLLM's kernels have no other ones
    for name, spec in (("read", "yarn:factor=4"), ("refused", "rerope:window=24"), ("scaled", "logn")):
        model = build("deepseek_v2", **sizes).float()
        rope_patch.patch(model, spec)
        model.save_pretrained(tmp_path / name)
        if name == "read":
            prompts = [tokens(length, seed=length)[0].tolist() for length in (20, 90)]
            settings = {"hf_overrides": {"max_position_embeddings": 128}, "max_model_len": 128}
            assert_same(engine_of(tmp_path / name, skip_tokenizer_init=True, **settings), model, prompts)
            continue
        with pytest.raises(rope_patch.UnsupportedModel, match="MLA is not supported"):
            engine_of(tmp_path / name, skip_tokenizer_init=True)


@pytest.mark.parametrize("spec", ["rerope:window=128+logn", "yarn:factor=4+logn"])
def test_two_processes_that_divide_the_heads(tmp_path, texts, spec):
    model = saved(tmp_path, spec)
    assert_same(engine_of(tmp_path, tensor_parallel_size=2), model, texts[:4])


def test_a_bias_is_refused_where_heads_are_divided(tmp_path):
    """Each process would take the slopes of the first heads."""
    saved(tmp_path, "rerope:window=64+alibi")
    with pytest.raises(rope_patch.UnsupportedModel, match=r"a bias with --tensor-parallel-size 2 is not supported"):
        engine_of(tmp_path, tensor_parallel_size=2)


def test_another_backend_is_refused(monkeypatch):
    """It would leave the scheme out."""
    from rope_patch.serving import vllm as plugin
    from rope_patch.serving.vllm_served import Served

    rotary = plugin.Rotary.__new__(plugin.Rotary)
    torch.nn.Module.__init__(rotary)
    rotary.served = Served(rope_patch.ReRoPE(window=64), [])
    layers = {"layer": type("Layer", (), {"impl": object()})}
    monkeypatch.setattr(plugin, "get_forward_context", lambda: type("Context", (), {"no_compile_layers": layers}))
    with pytest.raises(rope_patch.UnsupportedModel, match="--attention-backend FLASH_ATTN"):
        rotary(torch.arange(3), torch.zeros(3, 8), torch.zeros(3, 8))


def test_the_backend_of_gpus_is_in_place():
    """It cannot run here; what it calls is tested in test_flash.py."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rope_patch.serving import vllm as plugin

    plugin.register()
    plugin.register()  # as vLLM may
    assert AttentionBackendEnum.FLASH_ATTN.get_class() is plugin.FlashBackend
    assert plugin.FlashBackend.get_impl_cls() is plugin.FlashImpl


def test_a_model_without_a_record_is_not_even_read(monkeypatch):
    """It may need code of its own, or a config that Transformers does not know."""
    from rope_patch.serving import vllm_served

    monkeypatch.setattr(vllm_served.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was read"))
    model = type("Model", (), {"model": "nobody/knows", "revision": None, "hf_config": object()})
    assert vllm_served.served_of(type("Config", (), {"model_config": model})) is None


def test_the_config_is_not_changed(tmp_path):
    saved(tmp_path, "rerope:window=64")
    assert AutoConfig.from_pretrained(tmp_path).rope_patch["scheme"]["name"] == "rerope"


def test_a_model_that_vllm_runs_by_transformers_is_refused(tmp_path, texts):
    """The last test: an engine that raised is not left behind clean."""
    saved(tmp_path, "rerope:window=64")
    engine = engine_of(tmp_path, model_impl="transformers")
    with pytest.raises(rope_patch.UnsupportedModel, match="has no rotary module of vLLM"):
        engine.generate([{"prompt_token_ids": texts[0]}], use_tqdm=False)
