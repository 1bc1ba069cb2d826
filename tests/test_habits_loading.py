"""How people load a checkpoint from habit, and what they hear where there is none."""

from __future__ import annotations

import shutil
import socket
import time

import pytest
import torch
from huggingface_hub import errors as hub_errors

import rope_patch
from rope_patch import (
    ALiBi,
    AlreadyPatched,
    InvalidField,
    ReRoPE,
    UnknownScheme,
    YaRN,
    current_scheme,
    patch,
)
from rope_patch.errors import NoCheckpoint, RopePatchWarning
from rope_patch.saving import hub, loading
from tests.families import build
from tests.test_habits import folder, logits, model

__all__ = ["folder", "model"]


# --- in one line ---


@pytest.mark.parametrize("how", [lambda folder, scheme: (folder, scheme), lambda folder, scheme: (str(folder), scheme)])
@pytest.mark.parametrize("scheme", ["rerope:window=5+logn", {"rope_type": "yarn", "factor": 4.0}, YaRN(factor=4)])
def test_a_checkpoint_is_loaded_under_a_scheme(how, scheme, folder):
    loaded = rope_patch.from_pretrained(*how(folder, scheme))
    expected = build("llama")
    patch(expected, scheme)
    assert torch.equal(logits(loaded), logits(expected))
    assert current_scheme(rope_patch.from_pretrained(folder, scheme=scheme)) == current_scheme(expected)


@pytest.mark.parametrize(
    ("scheme", "arguments", "written"),
    [
        ("rerope", {"window": 5}, "'rerope:window=5'"),
        ("yarn", {"target": "4x"}, "'yarn:target=4x'"),
        ("yarn:factor=4", {"beta_fast": 16}, "'yarn:factor=4,beta_fast=16'"),
        ("rerope:window=5+logn", {"power": 2}, "'NAME:power=2'"),
    ],
)
def test_a_field_beside_the_checkpoint_stands_inside_the_scheme(scheme, arguments, written, folder):
    with pytest.raises(InvalidField) as caught:
        rope_patch.from_pretrained(folder, scheme, **arguments)
    assert f"write from_pretrained({str(folder)!r}, {written})" in str(caught.value)


def test_an_argument_of_nobody_stays_a_type_error(folder):
    with pytest.raises(TypeError, match="unexpected keyword argument 'load_in_4bit'"):
        rope_patch.from_pretrained(folder, load_in_4bit=True)


def test_rope_scaling_beside_the_checkpoint_is_a_scheme(folder):
    expected = build("llama")
    patch(expected, "yarn:factor=4")
    loaded = rope_patch.from_pretrained(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert torch.equal(logits(loaded), logits(expected))


def test_a_mistyped_scheme_is_told_before_the_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(loading, "_load", lambda *_: pytest.fail("the checkpoint was loaded"))
    with pytest.raises(UnknownScheme, match="'yarn'"):
        rope_patch.from_pretrained(folder, "yarm:factor=4")
    with pytest.raises(InvalidField, match="did you mean 'factor'"):
        rope_patch.from_pretrained(folder, "yarn:scale=4")
    monkeypatch.undo()
    with pytest.raises(rope_patch.errors.MissingField, match="on this model factor=4 reaches 128 tokens"):
        rope_patch.from_pretrained(folder, "yarn")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("config.json", "neither a folder nor a GGUF file; pass its folder"),
        ("model.safetensors", "neither a folder nor a GGUF file; pass its folder"),
        ("model-Q4_K_M.gguf", "no folder or file has this name"),
    ],
)
def test_a_file_of_a_checkpoint_is_not_sought_on_the_hub(typed, said, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(NoCheckpoint, match=said):
        rope_patch.from_pretrained(typed)


def test_a_gguf_file_is_named_as_in_transformers(folder, monkeypatch):
    with pytest.raises(NoCheckpoint, match=r"x\.gguf': no folder or file has this name"):
        rope_patch.from_pretrained(folder, "yarn:factor=4", gguf_file="x.gguf")
    (folder / "x.gguf").write_bytes(b"GGUF")
    read = []
    monkeypatch.setattr(loading, "load_gguf", lambda path, **given: read.append((path, given)) or build("llama"))
    rope_patch.from_pretrained(folder, gguf_file="x.gguf", revision="main", dtype="float32")
    assert read == [(folder / "x.gguf", {"dtype": "float32"})]


def test_a_checkpoint_with_another_scheme_is_not_silently_changed(model, tmp_path):
    patch(model, "rerope:window=5")
    model.save_pretrained(tmp_path)
    assert current_scheme(rope_patch.from_pretrained(tmp_path, "rerope:window=5")) == ReRoPE(5)
    with pytest.raises(AlreadyPatched, match=r"patch\(model, 'alibi', replace=True\)"):
        rope_patch.from_pretrained(tmp_path, "alibi")
    with pytest.warns(RopePatchWarning, match="alibi replaces the rotation"):
        assert current_scheme(rope_patch.from_pretrained(tmp_path, "alibi", replace=True)) == ALiBi()


# --- the Hub ---


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GatedRepoError", "accept its terms"),
        ("RepositoryNotFoundError", "not found on the Hub"),
        ("RevisionNotFoundError", "no such revision"),
        ("OfflineModeIsEnabled", "HF_HUB_OFFLINE"),
        ("LocalEntryNotFoundError", "was not reached"),
        ("HFValidationError", "typo.*gated.*out of reach"),
    ],
)
def test_the_answer_of_the_hub_is_named(kind, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", kind == "OfflineModeIsEnabled")
    asked = []

    def refuse(path, **_):
        asked.append(path)
        error = getattr(hub_errors, kind)
        cause = error.__new__(error)  # without the answer of a server
        raise OSError("it did not work") from cause

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", refuse)
    monkeypatch.setattr(loading, "_read_fields", lambda *_, **__: None)
    with pytest.raises(NoCheckpoint, match=words):
        loading._config_of("someone/something")
    assert len(asked) == 1


@pytest.fixture
def unreached(monkeypatch):
    """A network without names: the list of those that were looked up, of which huggingface_hub looks one up for itself.
    Nobody may wait and try again.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: False)
    asked = []

    def unknown(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def wait(seconds):
        raise AssertionError(f"waited {seconds} s to ask the Hub again")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(time, "sleep", wait)
    return asked


@pytest.mark.parametrize("load", [rope_patch.from_pretrained, loading.load_config, loading.load_tokenizer])
def test_a_hub_out_of_reach_is_asked_once(load, unreached):
    with pytest.raises(NoCheckpoint, match=r"there is no checkpoint 'someone/something'.*the Hub was not reached"):
        load("someone/something")
    assert len(unreached) <= 2


def test_the_cache_serves_where_the_hub_is_out_of_reach(folder, tmp_path, unreached):
    place = tmp_path / "cache" / "models--someone--something"
    shutil.copytree(folder, place / "snapshots" / "0123abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123abc")
    loaded = rope_patch.from_pretrained("someone/something", "rerope:window=5", cache_dir=tmp_path / "cache")
    assert current_scheme(loaded) == ReRoPE(5)
    assert len(unreached) <= 2


def test_a_hub_that_answers_is_left_to_transformers(monkeypatch):
    def answer(*_, **__):
        raise hub_errors.HfHubHTTPError.__new__(hub_errors.HfHubHTTPError)

    monkeypatch.setattr(hub, "get_hf_file_metadata", answer)
    assert hub.within_reach("someone/something", {"revision": "v1"}) == {"revision": "v1"}
