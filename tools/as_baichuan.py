"""Write the small Llama as a folder in the layout of Baichuan-7B: the same function under other names.

    python -m tools.as_baichuan runs/tiny-baichuan
    rope-patch perplexity --model runs/tiny-baichuan --scheme yarn:target=auto --lengths 256,1024 --targets 128

Queries, keys and values become one `W_pack`, and the config becomes one of Baichuan. Perplexities are those of the
small Llama, digit by digit; `--alibi` declares the layout of Baichuan-13B instead, whose positions are a penalty on
distance that these weights have never seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rope_patch.cli.options import Positional, run
from rope_patch.shipped import recipes_folder

if TYPE_CHECKING:
    import torch

LLAMA = recipes_folder() / "assets" / "tiny-llama"


@dataclass(kw_only=True)
class Options:
    folder: Positional[str]  # to write to
    alibi: bool = False  # the layout of Baichuan-13B


def main(options: Options) -> None:
    """Write weights, config and tokenizer."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = packed(load_file(LLAMA / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = published_config(json.loads((LLAMA / "config.json").read_text()), alibi=options.alibi)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    AutoTokenizer.from_pretrained(LLAMA).save_pretrained(folder)
    print(f"wrote {folder}")


def packed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under Baichuan's names, `W_pack` = [q; k; v], and the head that Llama ties to the embedding."""
    import torch

    renamed = {
        name: tensor for name, tensor in weights.items() if not name.endswith(("k_proj.weight", "v_proj.weight"))
    }
    for name in [name for name in renamed if name.endswith("q_proj.weight")]:
        parts = [weights[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
        renamed[name.replace("q_proj", "W_pack")] = torch.cat(parts)
        del renamed[name]
    renamed["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    return renamed


def published_config(llama: dict[str, object], alibi: bool) -> dict[str, object]:
    """The fields that the published configs have."""
    shared = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
    )
    special = ("rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "dtype")
    length = llama["max_position_embeddings"]
    return {
        "architectures": ["BaichuanForCausalLM" if alibi else "BaiChuanForCausalLM"],
        "model_type": "baichuan",
        **{name: llama[name] for name in (*shared, *special)},
        **({"model_max_length": length} if alibi else {"max_position_embeddings": length}),
        "tie_word_embeddings": False,
    }


if __name__ == "__main__":
    run(Options, main)
