"""Endless specs, empty inputs, impossible configs and damaged files: each ends at once in one line of our own."""

from __future__ import annotations

import contextlib
import json
import pickle

import pytest
import torch

from rope_patch import RopePatchError, UnsupportedModel, UnsupportedPositions, from_pretrained, patch, repatch
from rope_patch.errors import InvalidField, NoCheckpoint, NotPatched
from rope_patch.models.config import wrong_field
from rope_patch.schemes import get_scheme, scheme_from_dict
from rope_patch.schemes.slots import Tokens
from tests.cases import CASES
from tests.families import build
from tests.hardening.exploring import in_memory, in_time
from tests.models import t5_families
from tests.releases import since
from tests.runs import tokens


@contextlib.contextmanager
def one_line(error, said):
    """The block raises one line, soon and without much memory."""
    with in_memory(), in_time(), pytest.raises(error, match=said) as caught:
        yield
    assert isinstance(caught.value, RopePatchError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2100


# --- specs ------------------------------------------------------------------------------------------------------------

ENDLESS = {
    "layers:[0-999999999=rope;rest=none]": "'0-999999999' names layer 2; the stack has 2",
    "layers:[7-999999999=rope;rest=none]": "names layer 7; the stack has 2",
    "layers:[999999999-0=rope;rest=none]": "selects no attention layer",
    f"layers:[0-{'9' * 30}=rope;rest=none]": "is not a selector",
    f"layers:[0:{'9' * 5000}=rope;rest=none]": "is expected",
    f"layers:[{'9' * 5000}=rope;rest=none]": "is expected",
    "layers:[0:2:00=rope;rest=none]": "'0:2:00' is not a selector",
    "layers:[\u0660=rope;rest=none]": "is not a selector",
    f"layers:[{','.join(map(str, range(20000)))}=rope]": "names layer 2",
    "layers:[0=" * 100 + "rope" + "]" * 100: "nests brackets more than 8 deep",
    "layers:[" * 50000: "nests brackets",
    "rerope:window=" + "(" * 50000 + "4": "nests brackets",
    "longrope:short_factor=" + "[" * 300: "nests brackets",
    "x" * 500000: "there is no scheme",
}


@pytest.mark.parametrize("spec", ENDLESS, ids=lambda spec: spec[:40])
def test_a_spec_that_would_run_for_ever(spec):
    with one_line((InvalidField, KeyError), ENDLESS[spec]):
        patch(build("llama"), spec)


def test_selectors_that_mean_something_are_still_read():
    for selector in ("0-1", "0,1", "::1", "0:999999999", "-2:", "::01"):
        with patch(build("llama"), f"layers:[{selector}=rerope:window=6]") as handle:
            assert len(handle.plan.by_layer) == 1
    assert get_scheme("rope+" + "+".join(["logn"] * 5000)).parts()


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_dict_without_end(depth):
    data = {"name": "rope"}
    for _ in range(depth):
        data = {"name": "layers", "layers": {"0": data}}
    with one_line(InvalidField, "nested this deep"):
        scheme_from_dict(data)


def test_a_long_message_is_cut_in_its_middle_and_can_be_pickled():
    error = InvalidField("a" * 10_000 + "; allowed: 1")
    assert len(str(error)) < 2100
    assert str(error).endswith("a; allowed: 1")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(NoCheckpoint("short")) == "short"


# --- inputs -----------------------------------------------------------------------------------------------------------

EMPTY = [(0, 5), (2, 0), (0, 0)]


@pytest.mark.parametrize("mount", ["auto", "late"])
@pytest.mark.parametrize("name", CASES)
def test_an_input_without_tokens(name, mount, llama):
    with patch(llama, CASES[name], mount=mount):
        for shape in EMPTY:
            with one_line(UnsupportedPositions, rf"an input of shape \({shape[0]}, {shape[1]}\) has no tokens"):
                llama(torch.zeros(shape, dtype=torch.long))
        with one_line(UnsupportedPositions, "has no tokens"):
            llama(inputs_embeds=torch.zeros(0, 5, llama.config.hidden_size))


@since(torch, "2.12", "replaces an error that is raised behind a break of the graph by one of its own")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", ["rerope:window=6", "pi:factor=2", "sinusoidal"])
def test_a_compiled_model_without_tokens(spec):
    llama = build(num_hidden_layers=1)
    torch.compiler.reset()
    compiled = torch.compile(llama, backend="eager")
    with patch(llama, spec), torch.no_grad():
        for length in (7, 9, 11):  # the second is compiled for every length
            ids = tokens(length)
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, llama(ids, use_cache=False).logits)
            for shape in EMPTY:
                with one_line(UnsupportedPositions, rf"an input of shape \({shape[0]}, {shape[1]}\) has no tokens"):
                    compiled(torch.zeros(shape, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("spec", ["t5:interpolation=2", "rerope:window=6", "rnn"])
def test_an_encoder_without_tokens(spec):
    model, none = t5_families.build(), torch.zeros(0, 5, dtype=torch.long)
    with patch(model, spec), one_line(UnsupportedPositions, "has no tokens"):
        model(none, decoder_input_ids=none)


def test_a_recurrent_layer_without_texts():
    scheme = get_scheme("rnn:width=4")
    weights = dict.fromkeys(scheme.shared, torch.zeros(12, 4)) | {"gru_output": torch.zeros(8, 4)}
    weights |= {"gru_input": torch.zeros(12, 8)} | dict.fromkeys(("gru_input_bias", "gru_hidden_bias"), torch.zeros(12))
    for shape in EMPTY:
        ids = torch.zeros(shape, dtype=torch.long)
        assert scheme.embedding(Tokens(torch.zeros(*shape, 8), ids, ids), weights).shape == (*shape, 8)


# --- configs ----------------------------------------------------------------------------------------------------------

SIZES = ["hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"]
IMPOSSIBLE = [0, -1, 1.5, float("nan"), 10**30, "x", True, [], [0], {}]


@pytest.mark.parametrize("name", [*SIZES, "num_hidden_layers", "vocab_size"])
def test_an_impossible_size_of_a_model(name, llama):
    for value in IMPOSSIBLE:
        vars(llama.config)[name] = value
        with one_line(UnsupportedModel, rf"LlamaConfig: {name}=.*; it must be a whole number from 1 to 1"):
            patch(llama, "rerope", window=6)


@pytest.mark.parametrize(("name", "value"), [("layer_types", 3), ("layer_types", "x"), ("sliding_window", "x")])
def test_other_fields_of_the_wrong_type(name, value, llama):
    vars(llama.config)[name] = value
    with one_line(UnsupportedModel, f"LlamaConfig: {name}={value!r}; it must be"):
        patch(llama, "rerope", window=6)


def test_sizes_that_some_configs_have():
    fine = {"num_attention_heads": (4, 8), "num_hidden_layers": {"text": 2}, "max_position_embeddings": 1200.0}
    assert wrong_field({**fine, "head_dim": None, "num_key_value_heads": [1, 2], "hidden_size": 8}) == ""
    assert wrong_field({"head_dim": 0, "qk_rope_head_dim": 4}) == ""  # latent attention does not read it
    assert wrong_field({"text_config": {"head_dim": -1}}).startswith("head_dim=-1; it must be")
    assert wrong_field({"hidden_size": None}).startswith("hidden_size=None")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    return tmp_path


def rewrite(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in SIZES for value in (0, -1, "x", None)),
        ("num_hidden_layers", 10**30),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("layer_types", 3),
    ],
)
def test_an_impossible_field_of_a_folder(name, value, folder):
    rewrite(folder / "config.json", **{name: value})
    if value is None and name in ("head_dim", "num_key_value_heads"):
        return  # unset
    with one_line((NoCheckpoint, UnsupportedModel), f"{name}={value}" if value not in ("x", None) else name):
        patch(from_pretrained(folder), "rerope", window=6)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"null", b'"x"', b"3", b"\xff\xfe\x00", b"[" * 50_000, b"{}", b'{"model_type": 3}'],
    ids=lambda content: repr(content[:9]),
)
def test_a_config_that_is_no_config(content, folder):
    (folder / "config.json").write_bytes(content)
    with one_line(NoCheckpoint, "cannot be loaded"):
        from_pretrained(folder)


@pytest.mark.parametrize("size", [0, 7, 100, -1, -1000])
def test_weights_that_were_cut_off(size, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with one_line(NoCheckpoint, "SafetensorError"):
        from_pretrained(folder)


def test_learned_parameters_that_were_cut_off(folder):
    model = build("llama")
    with patch(model, "fox"):
        model.save_pretrained(folder)
    record = from_pretrained(folder).config.rope_patch
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with one_line(NoCheckpoint, "SafetensorError"):
        from_pretrained(folder)
    plain = build("llama")
    plain.config.rope_patch, plain.name_or_path = record, str(folder)
    with one_line(NotPatched, "learned parameters of fox"):
        repatch(plain)


@pytest.mark.parametrize(
    "index",
    ["{", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": "missing.safetensors"}, "metadata": {}}'],
)
def test_an_index_of_shards_that_are_not_there(index, folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with one_line(NoCheckpoint, "cannot be loaded"):
        from_pretrained(folder)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"x" * 100, b"GGUF\x03\0\0\0" + b"\xff" * 16])
def test_a_gguf_file_that_was_cut_off(content, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(content)
    with one_line(NoCheckpoint, "is not a GGUF file, or is truncated"):
        from_pretrained(tmp_path / "m.gguf")
