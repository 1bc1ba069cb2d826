"""What programs read of the positions in a checkpoint folder: the facts about each, in one table.

docs/serving.md has the facts about vLLM and llama.cpp, and how they were established.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rope_patch.errors import NotExpressible
from rope_patch.models.rope_parameters import entry_of, export_rope_parameters
from rope_patch.schemes.base import Scheme

NEED_L = ("yarn", "llama3", "longrope")
"""Types that need L, `original_max_position_embeddings`."""

_LLAMA_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
"""Architectures for which llama.cpp's converter writes the factors of `llama3`."""

_LAYER_TYPES = (
    "partly",
    "parameters by layer type: support depends on its code for this model, which was not checked",
)
_VLLM = "start it with --max-model-len {length}"


@dataclass(frozen=True)
class Reader:
    """The facts about one program.

    Attributes:
        support: by the form of the parameters (see `form_of`), whether it computes them, `yes`, `partly` or `no`, and
            its start options or the reason; the empty name is for all other forms.
        record: what becomes of a scheme that `config.rope_patch` alone records, as the end of a sentence.
        is_old: whether it reads `rope_scaling` and `rope_theta` alone.
        scaling_wins: whether `rope_scaling` replaces `rope_parameters`.
        needs_float: whether a factor of `linear` that is an integer keeps it from starting.
        l_at_top: types whose L it reads at the top of the config alone, and takes 8192 without it.
        cut: types whose texts it limits to `max_position_embeddings`, whatever L and the factor are.
    """

    name: str
    support: Mapping[str, tuple[str, str]]
    record: str = ""
    is_old: bool = False
    scaling_wins: bool = False
    needs_float: bool = False
    l_at_top: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()


_TRANSFORMERS = {"": ("yes", "5 reads rope_parameters; before 5, rope_scaling and rope_theta")}
_LOAD = ": load it with rope_patch.from_pretrained"

READERS = (
    Reader("Transformers 5", _TRANSFORMERS, _LOAD, scaling_wins=True),
    Reader("Transformers 4", _TRANSFORMERS, _LOAD, is_old=True),
    Reader(
        "vLLM",
        {
            "": ("yes", _VLLM),
            "by layer type": _LAYER_TYPES,
            "proportional": ("no", "its get_rope does not have this rope_type"),
            "linear": ("yes", f"{_VLLM}: otherwise it multiplies {{length}} by the factor again"),
            "longrope": ("partly", f"{_VLLM}; it then uses the long factors for short texts, too"),
            "yarn with a temperature": ("partly", f"{_VLLM}; older releases ignore attention_factor and mscale"),
            "dynamic": ("no", "it uses one base, for the longest text that it serves"),
        },
        record=", unless rope_patch is installed with it, on a CPU",
        scaling_wins=True,
        needs_float=True,
        cut=("llama3", "longrope"),  # it multiplies L of yarn by the factor
    ),
    Reader(
        "llama.cpp",
        {
            "": ("yes", "convert_hf_to_gguf.py writes it into the GGUF; start it with -c {length}"),
            "by layer type": _LAYER_TYPES,
            "yarn with a temperature": (
                "no",
                "it computes the temperature 0.1 ln k + 1 itself; --override-kv ARCH.rope.scaling.attn_factor=float:A "
                "corrects it, with A = attention_factor / (0.1 ln k + 1)",
            ),
            "yarn without rounding": ("no", "it rounds the ends of the ramp and does not support truncate=False"),
            "llama3 elsewhere": ("no", f"its converter writes llama3's factors for {', '.join(_LLAMA_CLASSES)} only"),
            "longrope": ("no", "its converter writes the two lists for a few architectures only, such as Phi-3"),
            "proportional": ("no", "its converter does not support this rope_type"),
            "dynamic": ("no", "it keeps the checkpoint's base"),
        },
        l_at_top=("llama3", "longrope"),
        cut=NEED_L,
    ),
)

TRANSFORMERS, _, VLLM, LLAMA_CPP = READERS

SERVERS = ("config", VLLM.name, LLAMA_CPP.name)
"""Programs that may serve a scheme; `config` is any program that reads the `rope_parameters` of Transformers."""


@dataclass(frozen=True)
class Support:
    """Whether a program computes the scheme from a folder: `reads` is `yes`, `partly` or `no`, and `words` are its
    start options, or the reason.
    """

    name: str
    reads: str
    words: str


def form_of(parameters: dict[str, Any], architectures: Any) -> str:
    """The form of `rope_parameters`, as far as readers differ about it: a `rope_type`, or a closer name."""
    kind = str(entry_of(parameters)["rope_type"])
    if kind == "dynamic":
        return kind
    if "rope_type" not in parameters:
        return "by layer type"
    if kind == "yarn" and any(parameters.get(key) is not None for key in ("attention_factor", "mscale")):
        return "yarn with a temperature"
    if kind == "yarn" and parameters.get("truncate") is False:
        return "yarn without rounding"
    if kind == "llama3" and not any(name in _LLAMA_CLASSES for name in architectures or ()):
        return "llama3 elsewhere"
    return kind


def supported(parameters: dict[str, Any], architectures: Any, length: int = 0) -> tuple[Support, ...]:
    """What Transformers, vLLM and llama.cpp make of `rope_parameters`, for a context of `length` tokens."""
    form = form_of(parameters, architectures)
    rows = []
    for name, reader in (("Transformers", TRANSFORMERS), (VLLM.name, VLLM), (LLAMA_CPP.name, LLAMA_CPP)):
        reads, words = reader.support.get(form, reader.support[""])
        rows.append(Support(name, reads, words.format(length=length)))
    return tuple(rows)


def served_by(scheme: Scheme | None, config: Any) -> list[str]:
    """Which of `SERVERS` can compute a scheme on a checkpoint, with "(partly)" after those with limits. All of them
    serve the plain checkpoint, which is None.
    """
    if scheme is None:
        return list(SERVERS)
    try:
        check_own_code(config.name_or_path, {"model_type": config.model_type, **vars(config)})
        parameters = export_rope_parameters(scheme, config.get_text_config())
    except NotExpressible:
        return []
    if entry_of(parameters)["rope_type"] == "dynamic":
        return []  # its readers disagree
    rows = zip(SERVERS, supported(parameters, config.architectures), strict=True)
    return [f"{name} (partly)" if row.reads == "partly" else name for name, row in rows if row.reads != "no"]


def check_own_code(folder: Any, fields: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose model is code of its own, by the fields of its config.

    Raises:
        NotExpressible: it is.
    """
    kind = fields.get("model_type")
    if fields.get("auto_map") or kind == "baichuan":
        raise NotExpressible(
            f"{folder} needs its own code ({kind}), which may ignore rope_parameters; "
            "serve it in Transformers with rope_patch.from_pretrained"
        )


def refused_by_vllm(scheme: Scheme) -> str:
    """What the vLLM plugin cannot compute from queries, keys and positions; empty if it can serve the scheme."""
    by_content = {"content_bias", "weight_factor", "relative_values", "running_bias"}
    refused = {
        "learned parameters": scheme.learns,
        "positions that are added at the input": "embedding" in scheme.slots,
        "content biases, and factors on weights": bool(scheme.methods & by_content),
    }
    return next((what for what, holds in refused.items() if holds), "")


def servers_of(scheme: Scheme, spelled: str) -> str:
    """What serves a scheme that no config expresses, as a sentence without its full stop."""
    if scheme.stateful or "running_bias" in scheme.methods:
        return "Only `generate` computes it: load it with rope_patch.from_pretrained"
    plugin = "" if refused_by_vllm(scheme) else ", and vLLM does with the plugin of this package (docs/how-to/serve.md)"
    return f"`rope-patch serve DIR --scheme {spelled}` serves it{plugin}"
