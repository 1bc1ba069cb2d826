"""What programs read of the positions in a checkpoint folder: the facts about each, in one table.

docs/serving.md has the facts about vLLM and llama.cpp, and how they were established.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rope_patch.errors import InvalidField, NotExpressible, did_you_mean
from rope_patch.models.rope_parameters import entry_of, export_rope_parameters
from rope_patch.schemes.base import Scheme
from rope_patch.typing import NO_WEIGHTS, Weights

NEED_L = ("yarn", "llama3", "longrope")  # types that need L, `original_max_position_embeddings`

LISTS = "equal lists", "equal lists with a temperature of their own"
"""The forms of `equal_lists`; the second with a temperature that does not follow from the length and L."""

YARN = "yarn with attention_factor", "yarn with mscale"
"""The forms of `yarn` whose temperature is not 0.1 ln k + 1."""

_LLAMA_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
"""Architectures for which llama.cpp's converter writes the factors of `llama3`."""

_DEEPSEEK_CLASSES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Architectures for which some servers have code of their own, which takes every type for yarn."""

_LAYER_TYPES = (
    "partly",
    "parameters by layer type: support depends on its code for this model, which was not checked",
)
_VLLM = "start it with --max-model-len {length}"


@dataclass(frozen=True)
class Reader:
    """The facts about one program.

    Attributes:
        key: its name behind `--for`.
        known: how the facts were established: run (the program, or its own rotary functions) or read (its source), and
            the version.
        support: by the form of the parameters (see `form_of`), whether it computes them, `yes`, `partly` or `no`, and
            its start options or the reason; the empty name is for all other forms.
        record: what becomes of a scheme that `config.rope_patch` alone records, as the end of a sentence.
        is_old: whether it reads `rope_scaling` and `rope_theta` alone.
        scaling_wins: whether `rope_scaling` replaces `rope_parameters`.
        needs_float: whether a factor of `linear` that is an integer keeps it from starting.
        l_at_top: types whose L it reads at the top of the config alone, and takes 8192 without it.
        only_yarn: whether its code for DeepSeek takes every type for yarn, without attention_factor and truncate.
        cut: types whose texts it limits to `max_position_embeddings`, whatever L and the factor are.
    """

    name: str
    key: str
    known: str
    support: Mapping[str, tuple[str, str]]
    record: str = ""
    is_old: bool = False
    scaling_wins: bool = False
    needs_float: bool = False
    only_yarn: bool = False
    l_at_top: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()


_TRANSFORMERS = {"": ("yes", "5 reads rope_parameters; before 5, rope_scaling and rope_theta")}
_LOAD = ": load it with rope_patch.from_pretrained"

READERS = (
    Reader("Transformers 5", "transformers", "run, 5.23", _TRANSFORMERS, _LOAD, scaling_wins=True),
    Reader("Transformers 4", "transformers4", "read, 4.57", _TRANSFORMERS, _LOAD, is_old=True),
    Reader(
        "vLLM",
        "vllm",
        "run, 0.32.0",
        {
            "": ("yes", _VLLM),
            "by layer type": _LAYER_TYPES,
            "proportional": ("partly", "it ignores the factor"),
            "linear": ("yes", f"{_VLLM}: otherwise it multiplies {{length}} by the factor again"),
            "longrope": ("partly", f"{_VLLM}; it then uses the long factors for short texts, too"),
            **dict.fromkeys(YARN, ("partly", f"{_VLLM}; older releases ignore attention_factor and mscale")),
            "dynamic": ("no", "it uses one base, for the longest text that it serves"),
        },
        record=", unless rope_patch is installed with it, on a CPU",
        scaling_wins=True,
        only_yarn=True,
        needs_float=True,
        cut=("llama3", "longrope"),  # it multiplies L of yarn by the factor
    ),
    Reader(
        "llama.cpp",
        "llama.cpp",
        "run, 0c1e570",
        {
            "": ("yes", "convert_hf_to_gguf.py writes it into the GGUF; start it with -c {length}"),
            "by layer type": _LAYER_TYPES,
            **dict.fromkeys(
                YARN,
                (
                    "no",
                    "it computes the temperature 0.1 ln k + 1 itself; --override-kv ARCH.rope.scaling.attn_factor="
                    "float:A corrects it, with A = attention_factor / (0.1 ln k + 1)",
                ),
            ),
            "yarn without rounding": ("no", "it rounds the ends of the ramp and does not support truncate=False"),
            "llama3 elsewhere": ("no", f"its converter writes llama3's factors for {', '.join(_LLAMA_CLASSES)} only"),
            **dict.fromkeys(
                ("longrope", *LISTS),
                (
                    "no",
                    "its converter writes lists of factors for a few architectures only, such as Phi-3; export to a "
                    "GGUF file instead: --output OUT.gguf",
                ),
            ),
            "proportional": ("no", "its converter does not support this rope_type"),
            "dynamic": ("no", "it keeps the checkpoint's base"),
        },
        l_at_top=("llama3", "longrope"),
        cut=NEED_L,
    ),
    Reader(
        "mlx-lm",
        "mlx",
        "run, 0.32.2",
        {
            "": ("yes", "its models of Llama's kind read rope_scaling and rope_theta alone"),
            "by layer type": _LAYER_TYPES,
            YARN[0]: ("no", "it ignores attention_factor and computes 0.1 ln k + 1"),
            YARN[1]: ("partly", "it reads mscale and mscale_all_dim, also where only one of them is given"),
            "yarn without rounding": ("no", "it rounds the ends of the ramp and does not support truncate=False"),
            "longrope": ("partly", "it uses the long factors for short texts, too, and ignores attention_factor"),
            LISTS[1]: ("no", "it ignores attention_factor and computes sqrt(1 + ln k / ln L)"),
            "dynamic": ("no", "it grows from max_position_embeddings={length}"),
        },
        is_old=True,
    ),
    Reader(
        "SGLang",
        "sglang",
        "read, 0.5.23",
        {
            "": ("yes", "--context-length {length}"),
            "by layer type": _LAYER_TYPES,
            YARN[0]: ("no", "it ignores attention_factor; it reads attn_factor and mscale"),
            YARN[1]: ("yes", "--context-length {length}"),
            "longrope": ("partly", "one text beyond L gives all texts of its batch the long factors"),
            "proportional": ("partly", "it ignores the factor"),
            "dynamic": ("no", "it uses one base, for the longest text that it serves"),
        },
        scaling_wins=True,
        only_yarn=True,
    ),
    Reader(
        "ONNX Runtime GenAI",
        "onnx",
        "read, 0.18.0",
        {
            "": ("no", "its builder for Llama reads llama3 alone and silently ignores other types"),
            "default": ("yes", "its builder reads rope_theta"),
            "llama3": ("yes", "its builder for Llama reads it"),
            "elsewhere": ("partly", "its builder reads linear and yarn, without attention_factor; others are refused"),
        },
        scaling_wins=True,
    ),
)

TRANSFORMERS, _, VLLM, LLAMA_CPP = READERS[:4]

SERVERS = ("config", VLLM.name, LLAMA_CPP.name)
"""Programs that may serve a scheme; `config` is any program that reads the `rope_parameters` of Transformers."""


@dataclass(frozen=True)
class Support:
    """Whether a program computes the scheme from a folder: `reads` is `yes`, `partly` or `no`, `words` are its start
    options or the reason, and `known` is how that was established, see `Reader`.
    """

    name: str
    reads: str
    words: str
    known: str


def form_of(parameters: dict[str, Any], architectures: Any) -> str:
    """The form of `rope_parameters`, as far as readers differ about it: a `rope_type`, or a closer name."""
    kind = str(entry_of(parameters)["rope_type"])
    if kind == "dynamic":
        return kind
    if "rope_type" not in parameters:
        return "by layer type"
    if kind == "yarn" and parameters.get("attention_factor") is not None:
        return YARN[0]
    if kind == "yarn" and any(parameters.get(key) is not None for key in ("mscale", "mscale_all_dim")):
        return YARN[1]
    if kind == "yarn" and parameters.get("truncate") is False:
        return "yarn without rounding"
    if kind == "llama3" and not _is_one(architectures, _LLAMA_CLASSES):
        return "llama3 elsewhere"
    if has_equal_lists(parameters):
        factor, trained = parameters.get("factor") or 1.0, parameters.get("original_max_position_embeddings") or 2
        follows = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(trained))
        return LISTS[abs(parameters.get("attention_factor", follows) / follows - 1) > 2e-3]
    return kind


def has_equal_lists(parameters: dict[str, Any]) -> bool:
    """Whether `rope_parameters` are lists of factors that are the same for short and long texts."""
    entry = entry_of(parameters)
    return bool(entry["rope_type"] == "longrope" and entry["short_factor"] == entry["long_factor"])


def _is_one(architectures: Any, classes: Collection[str]) -> bool:
    """Whether a config's `architectures`, which may be damaged, name one of these classes."""
    return isinstance(architectures, list) and any(name in classes for name in architectures)


def readers_called(keys: Iterable[str]) -> tuple[Reader, ...]:
    """The readers with these names behind `--for`; all of them without a name.

    Raises:
        InvalidField: there is no such reader.
    """
    by_key = {reader.key: reader for reader in READERS}
    for key in keys:
        if key not in by_key:
            raise InvalidField(f"there is no reader {key!r}; {did_you_mean(key, by_key)}")
    return tuple(by_key[key] for key in keys) or READERS


def supported(
    parameters: dict[str, Any], architectures: Any, length: int = 0, readers: Iterable[Reader] = READERS
) -> tuple[Support, ...]:
    """What each of some readers makes of `rope_parameters`, for a context of `length` tokens."""
    form, entry, rows = form_of(parameters, architectures), entry_of(parameters), []
    is_yarn = entry["rope_type"] == "yarn" and entry.get("attention_factor") is None and entry.get("truncate", True)
    misread = _is_one(architectures, _DEEPSEEK_CLASSES) and not is_yarn and form != "default"
    for reader in readers:
        elsewhere = None if _is_one(architectures, _LLAMA_CLASSES) else reader.support.get("elsewhere")
        reads, words = reader.support.get(form, elsewhere or reader.support[""])
        if misread and reader.only_yarn:
            reads, words = (
                "no",
                "its code for DeepSeek takes every type for yarn, without attention_factor and truncate",
            )
        rows.append(Support(reader.name, reads, words.format(length=length), reader.known))
    return tuple(rows)


def parameters_for(
    readers: Iterable[Reader],
    scheme: Scheme,
    config: Any,
    architectures: Any,
    length: int,
    weights: Weights = NO_WEIGHTS,
) -> dict[str, Any]:
    """The `rope_parameters` of a scheme that most of the readers compute: its own type, or `equal_lists`. Lists have
    their temperature in all the words for it.

    Args:
        readers: default all programs, of whom Transformers decides.
        config: of the unpatched checkpoint; it stays unchanged.
        architectures: of the config.
        length: the context to serve, in tokens.
        weights: as in `export_rope_parameters`.

    Raises:
        NotExpressible: neither form expresses the scheme; the message has the reason of its own type.
    """
    forms, reasons = [], []
    for as_lists in (None, length):
        try:
            forms.append(export_rope_parameters(scheme, config, as_lists, weights))
        except NotExpressible as error:
            reasons.append(error)
    if not forms:
        raise reasons[0]
    if len(forms) == 2 and has_equal_lists(forms[0]):
        del forms[0]  # the same lists with a temperature that fewer programs read
    order = ("yes", "partly", "no")
    rows = [supported(form, architectures, length, readers) for form in forms]
    worst = [sorted((order.index(row.reads) for row in each), reverse=True) for each in rows]
    chosen = forms[worst.index(min(worst))]
    for entry in [chosen] if "rope_type" in chosen else filter(None, chosen.values()):
        if entry["rope_type"] == "longrope" and "attention_factor" in entry:  # vLLM and SGLang read the others
            entry |= dict.fromkeys(("short_mscale", "long_mscale"), entry["attention_factor"])
    return chosen


def served_by(scheme: Scheme | None, config: Any) -> list[str]:
    """Which of `SERVERS` can compute a scheme on a checkpoint, with "(partly)" after those with limits. All of them
    serve the plain checkpoint, which is None.
    """
    if scheme is None:
        return list(SERVERS)
    try:
        check_own_code(config.name_or_path, {"model_type": config.model_type, **vars(config)})
        text = config.get_text_config()
        parameters = parameters_for((), scheme, text, config.architectures, text.max_position_embeddings)
    except NotExpressible:
        return []
    if entry_of(parameters)["rope_type"] == "dynamic":
        return []  # its readers disagree
    rows = zip(
        SERVERS, supported(parameters, config.architectures, readers=(TRANSFORMERS, VLLM, LLAMA_CPP)), strict=True
    )
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
