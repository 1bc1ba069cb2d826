"""Nothing that lies beside weights is run, and nothing is unpickled that was not asked for."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file

import rope_patch
from rope_patch import UnsupportedModel, patch
from rope_patch.errors import EvaluationError, InvalidField, NoCheckpoint
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import load_config, load_model, load_tokenizer
from tests.families import build
from tests.hardening.exploring import in_time
from tests.models import mrope_families
from tests.runs import tokens

REMOTE_CODE = "import pathlib\npathlib.Path({mark!r}).touch()\n"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint whose model and tokenizer are code beside the weights, which leaves a mark when it is run."""
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "not_a_type",
        "architectures": ["NotAType"],
        "auto_map": {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["modeling.T", null]}}')
    (tmp_path / "modeling.py").write_text(REMOTE_CODE.format(mark=str(tmp_path / "ran")))
    return tmp_path


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": True}])
def test_code_beside_the_weights_is_refused(folder, trust):
    with pytest.raises(UnsupportedModel, match="never run here"):
        rope_patch.from_pretrained(folder, **trust)
    for load in (load_model, load_tokenizer):
        with pytest.raises(EvaluationError):
            load(str(folder))
    assert not (folder / "ran").exists()


def test_pickled_weights_are_read_only_where_they_are_asked_for(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(OSError, match="use_safetensors=False"):
        rope_patch.from_pretrained(tmp_path)
    loaded = rope_patch.from_pretrained(tmp_path, use_safetensors=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_folder_without_weights_is_told_nothing_of_pickles(tmp_path):
    folder = tmp_path / "of-safetensors"
    build("llama").save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named") as caught:
        rope_patch.from_pretrained(folder)
    assert "use_safetensors=False" not in str(caught.value)


class Leaves:
    """What a pickle of it does to whoever reads it."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


def test_a_pickle_that_does_something_does_not(tmp_path):
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Leaves(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        rope_patch.from_pretrained(tmp_path, use_safetensors=False)
    assert not (tmp_path / "ran").exists()


def rewrite(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# --- settings that would run code ------------------------------------------------------------------------------------

REACHING = {
    "megatron_config": {"hidden_size": 8},
    "tokenizer_kwargs": {"trust_remote_code": True},
    "prompt_tuning_init_state_dict_path": "/etc/passwd",
    "adapters": {"0": "somebody/adapters"},
    "shadow_model": "somebody/model",
}


@pytest.fixture
def adapters(tmp_path):
    peft = pytest.importorskip("peft")
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.mark.parametrize("field", REACHING)
def test_adapters_do_not_let_peft_reach_out(field, adapters, monkeypatch):
    import peft

    rewrite(adapters / "adapter_config.json", **(dict.fromkeys(REACHING) | {"shadow_model": "mirror"}))
    rope_patch.from_pretrained(adapters)
    monkeypatch.setattr(peft.PeftModel, "from_pretrained", lambda *_, **__: pytest.fail("PEFT reads them"))
    rewrite(adapters / "adapter_config.json", **{field: REACHING[field]}, megatron_core="antigravity")
    with pytest.raises(InvalidField, match=f"adapter_config.json: {field}=.* is not allowed"):
        rope_patch.from_pretrained(adapters)
    with pytest.raises(NoCheckpoint, match=field):
        load_model(str(adapters), device="cpu")


KERNELS = ["owner/kernel", "owner/kernel@main:f", "paged|owner/kernel", "flash_attention_2", {"": "owner/kernel"}]


@pytest.fixture
def fetched(monkeypatch):
    """The kernels that Transformers asks the Hub for, none of which it gets."""
    names = []

    def fetch(name, **_):
        names.append(name)
        raise ImportError(name)

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", fetch)
    monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda *_: True)
    return names


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_a_config_does_not_choose_code_of_the_hub(field, kernel, fetched, tmp_path, recwarn):
    llama, ids = build("llama"), tokens(9)
    llama.save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", **{field: kernel})
    for loaded in (rope_patch.from_pretrained(tmp_path), load_model(str(tmp_path), device="cpu")):
        assert loaded.config._attn_implementation == "sdpa"
        assert torch.equal(loaded(ids).logits, llama(ids).logits)
    assert load_config(tmp_path)._attn_implementation is None
    told = [str(each.message) for each in recwarn if issubclass(each.category, rope_patch.RopePatchWarning)]
    assert field.endswith("internal") or "asks for attn_implementation=" in told[0]
    assert not fetched
    with patch(loaded, "rerope", window=4):
        loaded.save_pretrained(tmp_path / "again")
    assert "owner" not in (tmp_path / "again" / "config.json").read_text()


def test_whoever_asks_for_code_of_the_hub_gets_it(fetched, tmp_path, recwarn):
    build("llama").save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", attn_implementation="owner/kernel")
    with pytest.raises(ImportError, match="mine/kernel"):
        rope_patch.from_pretrained(tmp_path, attn_implementation="mine/kernel")
    with pytest.raises(NoCheckpoint, match="mine/kernel"):
        load_model(str(tmp_path), device="cpu", attention="mine/kernel")
    assert set(fetched) == {"mine/kernel"}
    assert not [each for each in recwarn if issubclass(each.category, rope_patch.RopePatchWarning)]


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_a_config_may_choose_what_pytorch_has(own, tmp_path):
    build("llama").save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", attn_implementation=own)
    assert rope_patch.from_pretrained(tmp_path).config._attn_implementation == own


@pytest.mark.filterwarnings("ignore::rope_patch.RopePatchWarning")
@pytest.mark.parametrize("where", ["text_config", "vision_config", "both"])
def test_nested_configs_do_not_choose_it_either(where, fetched, tmp_path):
    mrope_families.build("qwen2_vl").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    kernel = {"attn_implementation": "owner/kernel", "experts_implementation": "sonicmoe"}
    if where == "both":
        raw |= {"attn_implementation": {"": "eager", "text_config": "a/b", "vision_config": "c/d"}}
    else:
        raw[where] |= kernel
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = rope_patch.from_pretrained(tmp_path).config
    for each in (config, config.text_config, config.vision_config):
        assert each._attn_implementation in ("sdpa", "eager")
        assert each._experts_implementation in (None, "eager", "grouped_mm", "batched_mm")
    assert not fetched


def test_a_config_does_not_choose_experts_of_the_hub(tmp_path):
    build("granitemoe").save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", experts_implementation="sonicmoe")
    with pytest.warns(rope_patch.RopePatchWarning, match="experts_implementation='sonicmoe'"):
        assert rope_patch.from_pretrained(tmp_path).config._experts_implementation != "sonicmoe"


# --- files elsewhere -------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path):
    """A file of the system, beside which others lie."""
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "secret.json").write_text('{"key": "hunter2"}')
    return tmp_path / "system" / "secret.json"


@pytest.fixture
def model(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def leading_out(secret, folder, kind):
    """A file of the folder leads to a file of the system."""
    link = folder / ("config.json" if kind == "config" else "vocab.json")
    if kind == "config":  # of a model, too
        link.replace(secret)
    if kind in ("absolute", "config"):
        link.symlink_to(secret)
    elif kind == "relative":
        link.symlink_to("../system/secret.json")
    elif kind == "chain":
        (folder / ".hop").symlink_to("../system")
        (folder / "hop.json").symlink_to(".hop/secret.json")
        link.symlink_to("hop.json")
    elif kind == "templates":
        (folder / "additional_chat_templates").symlink_to(secret.parent)
    elif kind == "broken":
        link.symlink_to("missing.json")
    elif kind == "circle":
        link.symlink_to("vocab.json")
    elif kind == "pipe":
        os.mkfifo(link)
    elif kind == "device":
        link.symlink_to("/dev/zero")


KINDS = ["absolute", "config", "relative", "chain", "templates", "broken", "circle", "pipe", "device"]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_export_takes_no_file_of_elsewhere(kind, link, secret, model, tmp_path):
    leading_out(secret, model, kind)
    with (
        in_time(),
        pytest.raises(NoCheckpoint, match=r"outside of the checkpoint|is a broken link|is not a file|no config"),
    ):
        export_checkpoint(model, tmp_path / "out", "yarn:factor=2", link=link)
    assert not (tmp_path / "out").exists()


def as_in_the_cache(folder, repository):
    """The folder, as the Hub's cache has it: links to blobs."""
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(repository / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


@pytest.mark.parametrize("link", [False, True])
def test_export_follows_links_in_the_folder_and_those_of_the_hub(link, model, tmp_path):
    (model / "copy.json").symlink_to("generation_config.json")
    export_checkpoint(model, tmp_path / "out", "yarn:factor=2", link=link)
    expected = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert expected["copy.json"] == (model / "generation_config.json").read_bytes()
    (model / "copy.json").unlink()
    snapshot = as_in_the_cache(model, tmp_path / "models--a--b")
    (tmp_path / "named").symlink_to(snapshot)
    del expected["copy.json"]
    for number, source in enumerate((snapshot, tmp_path / "named")):
        export_checkpoint(source, tmp_path / f"{number}", "yarn:factor=2", link=link)
        assert {file.name: file.read_bytes() for file in (tmp_path / f"{number}").iterdir()} == expected
        assert not any(file.is_symlink() for file in (tmp_path / f"{number}").iterdir())


@pytest.mark.parametrize("target", ["../../secret.json", "../../refs/main", "../../blobs/deeper/secret", "../other/x"])
def test_nothing_beside_the_blobs_is_taken(target, model, secret, tmp_path):
    repository = tmp_path / "models--a--b"
    snapshot = as_in_the_cache(model, repository)
    for name in ("secret.json", "refs/main", "blobs/deeper/secret", "snapshots/other/x"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("hunter2")
    (snapshot / "vocab.json").symlink_to(target)
    with pytest.raises(NoCheckpoint, match="outside of the checkpoint"):
        export_checkpoint(snapshot, tmp_path / "out", "yarn:factor=2")
    (snapshot / "vocab.json").unlink()
    (repository / "blobs" / "f").symlink_to(secret)
    (snapshot / "vocab.json").symlink_to("../../blobs/f")
    with pytest.raises(NoCheckpoint, match="outside of the checkpoint"):
        export_checkpoint(snapshot, tmp_path / "out", "yarn:factor=2")


def sharded(folder, scheme=None):
    """A checkpoint of two files of weights; of learned weights, under a scheme."""
    llama = build("llama")
    if scheme:
        patch(llama, scheme)
    llama.save_pretrained(folder, max_shard_size="100KB")
    index = folder / "model.safetensors.index.json"
    return index, sorted(set(json.loads(index.read_text())["weight_map"].values()))


NAMES = {
    "..": "../other/{shard}",
    "inner ..": "inner/../../other/{shard}",
    "absolute": "{elsewhere}/{shard}",
    "backslash": "..\\other\\{shard}",
    "drive": "C:{shard}",
    "empty": "",
    "nul": "{shard}\0",
    "link": "link.safetensors",
    "chain": "first.safetensors",
    "folder": "link/{shard}",
    "no name": 3,
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors.index.fp16.json"])
def test_an_index_names_files_of_its_folder_alone(name, kind, tmp_path):
    folder, elsewhere = tmp_path / "model", tmp_path / "other"
    index, shards = sharded(folder)
    elsewhere.mkdir()
    (folder / shards[0]).rename(elsewhere / shards[0])
    (folder / "link.safetensors").symlink_to(elsewhere / shards[0])
    (folder / "first.safetensors").symlink_to("link.safetensors")
    (folder / "link").symlink_to(elsewhere)
    target = NAMES[kind]
    target = target.format(shard=shards[0], elsewhere=elsewhere) if isinstance(target, str) else target
    content = json.loads(index.read_text())
    content["weight_map"] = {
        key: target if shard == shards[0] else shard for key, shard in content["weight_map"].items()
    }
    index.unlink()
    (folder / name).write_text(json.dumps(content))
    variant = {"variant": "fp16"} if "fp16" in name else {}
    with pytest.raises(NoCheckpoint, match=r"weight_map|outside of the checkpoint"):
        rope_patch.from_pretrained(folder, **variant)
    with pytest.raises(NoCheckpoint, match=r"weight_map|outside of the checkpoint"):
        export_checkpoint(folder, tmp_path / "out", "yarn:factor=2")
    plain = build("llama")
    with patch(plain, "ssmax") as handle:
        pass
    plain.config.rope_patch, plain.name_or_path = {"scheme": handle.scheme.to_dict()}, str(folder)
    with pytest.raises(rope_patch.NotPatched, match=r"weight_map|outside of the checkpoint"):
        rope_patch.repatch(plain)


@pytest.mark.parametrize("scheme", [None, "ssmax"])
def test_shards_in_the_folder_and_in_the_cache_of_the_hub_are_read(scheme, tmp_path):
    _, shards = sharded(tmp_path / "model", scheme)
    assert len(shards) > 1
    ids = tokens(9)
    expected = rope_patch.from_pretrained(tmp_path / "model")(ids).logits
    snapshot = as_in_the_cache(tmp_path / "model", tmp_path / "models--a--b")
    assert torch.equal(rope_patch.from_pretrained(snapshot)(ids).logits, expected)


def test_a_pipe_is_no_gguf_file(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    with in_time(), pytest.raises(NoCheckpoint, match="neither a folder nor a GGUF file"):
        rope_patch.from_pretrained(tmp_path / "m.gguf")
