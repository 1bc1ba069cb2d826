"""From the members of packages to a folder of Transformers: GGUF, llama2.c, ONNX of T5, and plain text."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rope_patch.errors import EvaluationError


def convert_text(members: Iterator[bytes], folder: Path, dtype: str) -> None:
    """Chapters or files, joined by an empty line, as one file."""
    (folder / f"{folder.name}.txt").write_bytes(b"\n".join(members))


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
        raise EvaluationError("encoder and decoder have different embeddings, which T5 does not have")
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
    declared = {name: value for name, value in config.to_dict().items() if name != "scale_decoder_outputs"}
    (folder / "config.json").write_text(json.dumps(declared | {"tie_word_embeddings": False}, indent=2) + "\n")
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
    weights = {}
    for name in [name for name in tensors if not name.endswith(("_scale", "_zero_point"))]:
        value, stem = tensors.pop(name), name.removesuffix("_quantized")
        if stem != name:
            value = (value.float() - tensors.pop(f"{stem}_zero_point").float()) * tensors.pop(f"{stem}_scale")
        if name in modules:
            weights[".".join(modules[name]) + ".weight"] = value.T
        else:
            weights[stem] = value
    if tensors:
        raise EvaluationError(f"the ONNX graph has initialisers that belong to no parameter: {', '.join(tensors)}")
    return weights


CONVERSIONS = {"gguf": convert_gguf, "llama2c": convert_llama2c, "t5_onnx": convert_t5_onnx, "text": convert_text}
