"""What a vector is before its numbers, the values that several share, and one maker for each spelling of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

L, HEAD = 64, 32
FAR = (131_071, 1_000_000)
"""The last positions of a text of 128K, and of one of a million tokens."""

SHORT, LONG = [1 + i / 16 for i in range(16)], [1 + i / 2 for i in range(16)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": L}
EQUAL = {"short_factor": LONG, "long_factor": LONG}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.5}
TEMPERATURE = {"attention_factor": 1.1, "short_mscale": 1.1, "long_mscale": 1.1}
OPTIONS = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.2}
LLAMA_3_1 = {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

SIZES: dict[str, Any] = {
    **{"hidden_size": 2 * HEAD, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD},
    **{"num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 8, "rms_norm_eps": 1e-6},
}

Text = tuple[tuple[int, ...], ...]
"""Positions of some tokens of one text, by axis."""


@dataclass(frozen=True)
class Case:
    """One vector before its numbers.

    Attributes:
        says: one sentence, what a reader that fails it does.
        config: as a checkpoint has it.
        layer_type: the layers that it is about; empty if all are alike.
        traps: threads about programs that it would have caught.
        known: what a program that was held to it is known to do otherwise, by its name.
        texts: the texts whose rows it has.
    """

    says: str
    config: dict[str, Any]
    layer_type: str = ""
    traps: tuple[str, ...] = ()
    known: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[Text, ...] = ()


def texts_of(trained: int, longest: int) -> tuple[Text, ...]:
    """A short text, a long one, and one of a million tokens; the first two tokens have the positions 0 and 1."""
    return (
        ((0, 1, trained - 1),),
        ((0, 1, trained - 1, trained, longest - 1),),
        ((0, 1, *FAR),),
    )


TEXTS = texts_of(L, 4 * L)
IMAGES: tuple[Text, ...] = (
    # two words, a video of two frames with places by height and width, a word
    ((0, 1, 2, 2, 2, 3, 5), (0, 1, 2, 2, 3, 3, 5), (0, 1, 2, 4, 3, 2, 5)),
    ((0, 1, FAR[0], FAR[1]), (0, 1, FAR[0] + 9, FAR[1] - 10), (0, 1, FAR[0] + 6, FAR[1] - 17)),
)


def llama(says: str, entry: dict[str, Any], *traps: str, longest: int | None = None, **config: Any) -> Case:
    """A Llama with the words of Transformers 5; other keys of its config are `config`, and None takes one away."""
    entry = {"rope_type": "default", "rope_theta": 10000.0, **entry}
    if longest is None:
        longest = L if entry["rope_type"] in ("default", "dynamic") else 4 * L
    fields = {"model_type": "llama", **SIZES, "max_position_embeddings": longest, "rope_parameters": entry} | config
    return Case(says, {key: value for key, value in fields.items() if value is not None}, traps=traps, texts=TEXTS)


def older(says: str, entry: dict[str, Any], *traps: str, theta: float | None = 5e5, **config: Any) -> Case:
    """A Llama with the words of Transformers before 5: `rope_scaling`, and theta at the top."""
    fields = {"rope_scaling": entry, "rope_theta": theta, "rope_parameters": None, "max_position_embeddings": 4 * L}
    return llama(says, {}, *traps, **(fields | config))


def sized(
    says: str, head: int, trained: int, longest: int, *traps: str, model_type: str = "llama", **config: Any
) -> Case:
    """A model with the head, L and limit of a published checkpoint."""
    sizes = SIZES | {"hidden_size": 2 * head, "head_dim": head, "max_position_embeddings": longest}
    return Case(says, {"model_type": model_type, **sizes, **config}, traps=traps, texts=texts_of(trained, longest))


def nested(says: str, kind: str, full: dict[str, Any], *traps: str, known: str = "", **config: Any) -> Case:
    """A Gemma 3 whose full attention has parameters of its own."""
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    parameters = {"full_attention": {"rope_type": "default", "rope_theta": 1e6, **full}, "sliding_attention": sliding}
    fields = {"model_type": "gemma3_text", **SIZES, "max_position_embeddings": 4 * L, "rope_parameters": parameters}
    fields |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], **config}
    fields = {key: value for key, value in fields.items() if value is not None}
    return Case(says, fields, kind, traps, {"Transformers": known} if known else {}, TEXTS)
