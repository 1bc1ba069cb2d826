"""GGUF files, written by gguf's own writer: what they give, and what is refused."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

import rope_patch
from rope_patch.cli import main
from rope_patch.errors import EvaluationError, MissingPackage
from rope_patch.models.config import training_length
from rope_patch.saving import loading
from rope_patch.saving.loading import load_config, load_model, load_tokenizer
from tests.evaluation.conftest import TRAINING_LENGTH, tiny_llama
from tests.families import FAMILIES, from_config
from tests.runs import logits, tokens

gguf = pytest.importorskip("gguf")

PIECES = ["<s>", *(chr(code) for code in range(0x21, 0x7F)), "Ġ", "Ċ", "ĠĠ", "ĊĊ"]
"""Spellings of bytes in a byte-level vocabulary; what is missing is not in the texts here."""


def interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix as llama.cpp has them: the two of a rotated pair side by side."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.shape)


def write(
    path, model: PreTrainedModel, quantised=(), more=None, settings=None, architecture="llama", numbers=None
) -> None:
    config = model.config
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(PIECES + [f"[{i}]" for i in range(config.vocab_size - len(PIECES))])
    writer.add_token_types([3] + [1] * (config.vocab_size - 1))
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ"])  # Transformers 5.17 reads a list of one as its item
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, value in (settings or {}).items():
        writer.add_string(name, value)
    for name, (kind, value) in (numbers or {}).items():
        getattr(writer, f"add_{kind}")(f"{architecture}.{name}", value)
    known = getattr(gguf.MODEL_ARCH, architecture.upper(), gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        matrix = value.float().numpy()
        if "gemma" in architecture and "norm" in name:
            matrix = matrix + 1
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            matrix = interleaved(matrix, heads)
        name, _, kind = name.rpartition(".")
        if name != "lm_head" or not config.tie_word_embeddings:
            tensors[f"{names.get_name(name)}.{kind}"] = matrix
    for name, matrix in (tensors | (more or {})).items():
        kind = gguf.GGMLQuantizationType.Q8_0
        if name.split(".")[-2] in quantised:
            writer.add_tensor(name, gguf.quantize(matrix, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, tiny_llama())
    return path


def test_the_weights_of_a_file_are_those_that_were_written(file):
    theirs, ours = tiny_llama().state_dict(), load_model(str(file), dtype="float32", device="cpu").state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    halved = load_model(str(file), device="cpu").state_dict()
    assert all(torch.equal(theirs[name].bfloat16(), halved[name]) for name in theirs)


@pytest.mark.parametrize(("instructions", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_processor_without_bfloat16_loads_float32(file, monkeypatch, instructions, dtype):
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda: instructions)
    assert load_model(str(file), dtype="auto", device="cpu").dtype == dtype
    with loading.as_folder(str(file)) as folder:  # what is written does not depend on the processor
        assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16


def test_quantised_matrices_are_unpacked(tmp_path):
    write(tmp_path / "q8.gguf", tiny_llama(), quantised=("attn_q", "ffn_up"))
    theirs, ours = tiny_llama(), load_model(str(tmp_path / "q8.gguf"), dtype="float32", device="cpu")
    for their_layer, our_layer in zip(theirs.model.layers, ours.model.layers, strict=True):
        their_matrix, our_matrix = their_layer.self_attn.q_proj.weight, our_layer.self_attn.q_proj.weight
        step = their_matrix.abs().amax(1, keepdim=True) / 127  # of a block of 32, here a row; itself held in float16
        assert 0 < ((our_matrix - their_matrix).abs() / step).max() < 0.5 + 127 * 2**-11
        assert torch.equal(our_layer.self_attn.k_proj.weight, their_layer.self_attn.k_proj.weight)
    assert not getattr(ours, "hf_quantizer", None)  # Trainer would not train it


def test_config_and_tokenizer_come_from_the_file(file):
    assert training_length(load_config(str(file))) == TRAINING_LENGTH
    tokenizer = load_tokenizer(str(file))
    assert tokenizer("if  12\n  3").tokens() == ["i", "f", "ĠĠ", "1", "2", "Ċ", "ĠĠ", "3"]
    assert tokenizer.decode(tokenizer("a  b").input_ids) == "a  b"


def test_a_patched_file_is_scored_as_the_folder_is(file):
    ids = torch.randint(1, 90, (1, 3 * TRAINING_LENGTH), generator=torch.Generator().manual_seed(0))
    ours, theirs = rope_patch.from_pretrained(file, dtype=torch.float32), tiny_llama()
    for model in (ours, theirs):
        rope_patch.patch(model, "rerope:window=8")
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_commands_take_a_file_wherever_they_take_a_folder(file, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    words = ["--model", str(file), "--text", str(text), "--dtype", "float32", "--device", "cpu"]
    measured = [
        "perplexity",
        *words,
        "--lengths",
        "16,32",
        "--documents",
        "1",
        "--output",
        str(tmp_path / "p"),
        "--json",
    ]
    assert main(measured) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["length"] for row in rows} == {16, 32}
    assert main(["describe", "--model", str(file), "--scheme", "yarn:factor=2"]) == 0
    assert main(["sweep", "--model", str(file), "--target", "2x", "--dry-run"]) == 0
    assert f"lengths 16, 32 (L = {TRAINING_LENGTH})" in capsys.readouterr().out
    exported = tmp_path / "exported"
    assert main(["export", str(file), "--scheme", "yarn:factor=2", "--output", str(exported)]) == 0
    assert json.loads((exported / "config.json").read_text())["max_position_embeddings"] == 2 * TRAINING_LENGTH
    assert load_tokenizer(str(exported))("ab  1").input_ids == load_tokenizer(str(file))("ab  1").input_ids
    assert rope_patch.from_pretrained(exported).config.rope_parameters["rope_type"] == "yarn"


def test_adapters_on_a_file_are_loaded_on_it_again(file, tmp_path):
    peft = pytest.importorskip("peft")
    model = rope_patch.from_pretrained(file, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapters")
    ids = torch.arange(1, 12)[None]
    again = rope_patch.from_pretrained(tmp_path / "adapters", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(adapted.eval()(ids).logits, again.eval()(ids).logits)


def refused(path, load=load_model) -> str:
    with pytest.raises(EvaluationError) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("load", [load_model, load_config, load_tokenizer])
@pytest.mark.parametrize("content", [b"", b"GGUF", b"no such file", b"PK\3\4" + bytes(100)])
def test_what_is_no_gguf_file_is_one_line(content, load, tmp_path):
    (tmp_path / "x.gguf").write_bytes(content)
    assert "not a GGUF file" in refused(tmp_path / "x.gguf", load)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.98])
def test_a_file_that_ends_too_early_is_refused(part, file, tmp_path):
    whole = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(part * len(whole))])
    assert "truncated" in refused(tmp_path / "cut.gguf")


def test_an_architecture_that_transformers_cannot_read_is_one_line(tmp_path):
    write(tmp_path / "x.gguf", tiny_llama(), architecture="clip")
    assert "clip" in refused(tmp_path / "x.gguf")


def test_tensors_that_transformers_would_leave_out_are_refused(tmp_path):
    """Llama 3.1's own divisors of the frequencies, without which its positions are others."""
    write(tmp_path / "x.gguf", tiny_llama(), more={"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    assert "rope_freqs.weight" in refused(tmp_path / "x.gguf")


def test_tensors_that_are_missing_are_refused(tmp_path):
    model = tiny_llama()
    del model.model.layers[1].mlp.up_proj
    write(tmp_path / "x.gguf", model)
    assert "ignores a part of this file" in refused(tmp_path / "x.gguf")


@pytest.mark.parametrize("load", [load_model, load_config])
def test_rope_scaling_that_transformers_would_leave_out_is_refused(load, tmp_path):
    write(tmp_path / "x.gguf", tiny_llama(), settings={"llama.rope.scaling.type": "yarn"})
    assert "rope scaling 'yarn'" in refused(tmp_path / "x.gguf", load)
    write(tmp_path / "y.gguf", tiny_llama(), settings={"llama.rope.scaling.type": "none"})
    load(str(tmp_path / "y.gguf"))


def of(model_type: str, **values) -> PreTrainedModel:
    shape = {**FAMILIES["qwen3"], "vocab_size": 128, "tie_word_embeddings": "gemma" in model_type}
    return from_config(AutoConfig.for_model(**{**shape, "model_type": model_type, **values}))


CAPPED = {"attn_logit_softcapping": ("float32", 3.0), "final_logit_softcapping": ("float32", 2.0)}
WINDOWS = {"attention.sliding_window": ("uint32", 8), "attention.sliding_window_pattern": ("uint32", 2)}
TWO_BASES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


@pytest.mark.parametrize(
    ("architecture", "values", "numbers"),
    [
        ("qwen3", {"head_dim": 32}, {}),
        ("qwen2", {"head_dim": 32}, {}),
        ("gemma2", {"head_dim": 256, "sliding_window": 8, **{name: cap for name, (_, cap) in CAPPED.items()}}, CAPPED),
        (
            "gemma3",
            {"head_dim": 256, "sliding_window": 8, "sliding_window_pattern": 2, "rope_parameters": TWO_BASES},
            {"rope.freq_base_swa": ("float32", 2e4)},
        ),
    ],
)
def test_what_a_file_states_reaches_the_model(architecture, values, numbers, tmp_path):
    theirs = of({"gemma3": "gemma3_text"}.get(architecture, architecture), **values)
    theirs.set_attn_implementation("eager")  # sdpa ignores or refuses softcaps
    stated = {"attention.key_length": ("uint32", theirs.config.head_dim), **numbers}
    windows = WINDOWS if "gemma" in architecture else {}
    write(tmp_path / "x.gguf", theirs, architecture=architecture, numbers={**stated, **windows})
    ours = rope_patch.from_pretrained(tmp_path / "x.gguf", dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(logits(ours, tokens()), logits(theirs, tokens()))


def test_the_width_of_heads_follows_from_the_sizes_where_no_file_states_it(tmp_path):
    theirs = of("qwen2", hidden_size=64, num_attention_heads=4, head_dim=16)
    write(tmp_path / "x.gguf", theirs, architecture="qwen2")
    ours = rope_patch.from_pretrained(tmp_path / "x.gguf", dtype=torch.float32)
    assert not hasattr(ours.config, "head_dim")
    assert torch.equal(logits(ours, tokens()), logits(theirs, tokens()))


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_scale_of_scores_that_no_file_states_is_refused_or_given(architecture, tmp_path):
    theirs = of({"gemma3": "gemma3_text"}.get(architecture, architecture), query_pre_attn_scalar=24, sliding_window=8)
    numbers = {"attention.key_length": ("uint32", 16), "attention.sliding_window": ("uint32", 8)}
    path = tmp_path / "x.gguf"
    write(path, theirs, architecture=architecture, numbers=numbers)
    for load in (load_model, load_config):
        assert "does not state query_pre_attn_scalar, and head_dim=16" in refused(path, load)
    ours = rope_patch.from_pretrained(path, dtype=torch.float32, query_pre_attn_scalar=24, attn_implementation="eager")
    theirs.set_attn_implementation("eager")
    assert torch.equal(logits(ours, tokens()), logits(theirs, tokens()))


def test_the_scale_of_the_widest_gemma_follows_from_its_sizes(tmp_path):
    theirs = of("gemma2", num_hidden_layers=46, hidden_size=96, query_pre_attn_scalar=24, sliding_window=8)
    write(tmp_path / "x.gguf", theirs, architecture="gemma2", numbers={"attention.key_length": ("uint32", 16)})
    assert load_config(str(tmp_path / "x.gguf")).query_pre_attn_scalar == 24


def test_without_the_package_its_extra_is_named(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for load in (load_model, load_config, load_tokenizer):
        with pytest.raises(MissingPackage, match=r'pip install "\.\[gguf\]" in a checkout'):
            load(str(file))
    assert main(["describe", "--model", str(file)]) == 2
    assert ".[gguf]" in capsys.readouterr().err
