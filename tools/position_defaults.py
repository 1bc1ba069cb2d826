"""Writes rope_patch/doctor/architectures.json: what the installed Transformers takes where a config says nothing.

    python -m tools.position_defaults

A line for each model type: `{}` is as Llama, `false` has no rotary positions, a text says why its positions cannot be
read from the config, and the fields are those of `rope_patch.doctor.architecture.Architecture`. Each value is found by
a trial: a config is made with one field changed, and its rotary module shows what became of it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import pydoc
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from rope_patch.doctor.architecture import LOCAL_THETA, PARTIAL, THETA, WIDTHS, Architecture
from rope_patch.doctor.entries import ALL, ENTRY, ORIGINAL

FILE = Path(__file__).parents[1] / "rope_patch/doctor/architectures.json"

PLANES = "it rotates by places in an image or a video, by code of its own"
OWN = {
    "blt": "its parts have configs of their own: pass one of them",
    "chatglm": "its remote code multiplies theta by rope_ratio and rotates half of a head",
    **dict.fromkeys(
        ("cohere_compass", "cohere_compass_text"), "only layer types that rope_parameters name rotate, by image axes"
    ),
    "clvp": "it rotates by code of its own, with theta = 10000",
    "clvp_decoder": "it rotates by code of its own, with theta = 10000",
    "clvp_encoder": "it rotates by code of its own, with theta = 10000",
    "dots3_note": "its layer types rotate parts of heads of their own widths",
    "dots3_note_text": "its layer types rotate parts of heads of their own widths",
    "efficientloftr": PLANES,
    "esm": "it rotates by code of its own where position_embedding_type is rotary, with theta = 10000",
    "esmfold2": "it rotates by code of its own, with theta = 10000",
    "seamless_m4t": "it rotates audio by code of its own",
    "seamless_m4t_v2": "it rotates audio by code of its own",
    "wav2vec2-bert": "it rotates audio by code of its own",
    "wav2vec2-conformer": "it rotates audio by code of its own",
    **dict.fromkeys(("dinov3_vit", "eomt_dinov3", "llama4_vision_model", "neomme", "sapiens2", "vjepa2"), PLANES),
    **dict.fromkeys(("edgetam_video", "mlcd", "sam2_video", "sam3_tracker_video"), PLANES),
}
"""Types whose rotary code is their own, and types of remote code that is known, with the reason."""

_PARTS = {"heeds_partial": True, "reads_partial": ["rotary_dim"]}
FIXED: dict[str, dict[str, Any]] = {"codegen": _PARTS, "gptj": _PARTS, "roformer": {}}
"""Types without words for theta and scaling, which rotate with 10,000."""

OVERRIDDEN: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "reads_head_dim": ["head_dim"],
        "theta": {"main": 10000.0, "compress": 160000.0},
        "reads_theta": {"main": ["rope_theta"], "compress": ["compress_rope_theta"]},
        "partial": 0.125,
        "rope_parameters": {},
        "split": True,
    },
    "mistral4": {
        "head_dim": 128,
        "reads_head_dim": ["qk_nope_head_dim+qk_rope_head_dim"],
        "partial": 0.5,
        "reads_partial": ["qk_rope_head_dim"],
    },
}
"""Values that no trial of one field shows: DeepSeek V4 splits the words of a config, Mistral 4 adds up the two parts of
a head.
"""

SWITCHES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "zamba2": {"use_mem_rope": True},
}
"""Types that rotate only where a field has this value."""

_TRIAL = 12345.0
_LINEAR = {"rope_type": "linear", "factor": 7.0}
_SIZES = ("hidden_size", "num_attention_heads", "max_position_embeddings")
_LLAMA = Architecture()


def main() -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in table())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def table() -> Iterator[tuple[str, Any]]:
    """The value of each model type."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    for name in sorted({*CONFIG_MAPPING._mapping, *OWN}):
        yield name, OWN.get(name) or described(name)


def described(name: str) -> Any:
    """The value of one model type."""
    plain = attempt(CONFIG_MAPPING[name])
    if plain is None:
        return False
    text = text_of(plain)
    if type(text) is not type(plain) and text.model_type in CONFIG_MAPPING:
        return {"text": text.model_type}
    if name in FIXED:
        heads = {"partial": text.rotary_dim / (text.n_embd // text.n_head)} if hasattr(text, "rotary_dim") else {}
        return {**sizes(text), **heads, **FIXED[name], "fixed": True}
    if not getattr(text, "rope_parameters", None):
        return False
    if text.rope_parameters.get("rope_type") == "axial":
        return PLANES
    if turned(text) is None:
        return "it rotates by code of its own"
    return {**Type(type(text)).described(), **OVERRIDDEN.get(name, {})}


def attempt(cls: type[PreTrainedConfig], **fields: Any) -> PreTrainedConfig | None:
    """A config with these fields; None if the class refuses them."""
    with contextlib.suppress(Exception):
        return cls(**fields)
    return None


def text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text model; of two, that of the decoder."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def setting(config: PreTrainedConfig, name: str) -> Any:
    """A field of a config; None if it has no such field, or one for each layer."""
    with contextlib.suppress(Exception):
        return getattr(config, name)
    return None


def rotary_classes(config: PreTrainedConfig) -> list[type]:
    """The rotary modules of the file that has a config's model, those that take this very config first."""
    module = pydoc.locate(type(config).__module__.replace(".configuration_", ".modeling_"))
    if module is None:  # a type that another one's model serves
        model = getattr(transformers, str(MODEL_MAPPING_NAMES.get(config.model_type)), None)
        if model is None:
            return []
        module = pydoc.locate(model.__module__)
    found = [
        each
        for name, each in inspect.getmembers(module, inspect.isclass)
        if "Rotary" in name and "config" in inspect.signature(each).parameters
    ]
    return sorted(found, key=lambda each: (not _takes(each, config), "VisionRotary" in each.__name__))


def _takes(module: type, config: PreTrainedConfig) -> bool:
    annotated = inspect.signature(module).parameters["config"].annotation
    return getattr(annotated, "__name__", annotated) == type(config).__name__


def turned(config: PreTrainedConfig) -> dict[str, tuple[list[float], float]] | None:
    """Frequencies and the factor on cos and sin by layer type, as the model's module has them; None if it has none."""
    with contextlib.suppress(Exception):
        return frequencies(rotary_classes(config)[0](config))
    return None


def frequencies(module: Any) -> dict[str, tuple[list[float], float]]:
    """As `turned`, of a rotary module."""
    if hasattr(module, "inv_freq"):
        return {ALL: (module.inv_freq.double().tolist(), float(module.attention_scaling))}
    names = [name for name in dict(module.named_buffers()) if name.endswith("_inv_freq") and "_original_" not in name]
    return {
        (kind := name.removesuffix("_inv_freq")): (
            getattr(module, name).double().tolist(),
            float(getattr(module, f"{kind}_attention_scaling")),
        )
        for name in sorted(names)
    }


def sizes(text: PreTrainedConfig) -> dict[str, Any]:
    """Sizes that are not Llama's, and what the config calls them."""
    found: dict[str, Any] = {}
    for name in _SIZES:
        value = setting(text, name)
        if isinstance(value, int) and value != getattr(_LLAMA, name):
            found[name] = value
    aliases = {**{value: key for key, value in reversed(text.attribute_map.items())}, **text.attribute_map}
    if names := {name: aliases[name] for name in _SIZES if name in aliases}:
        found["names"] = names
    return found


class Type:
    """Trials with the config class of one model type, whose defaults are `plain`."""

    def __init__(self, cls: type[PreTrainedConfig]) -> None:
        self.cls = cls
        self.plain = cls(**SWITCHES.get(cls.model_type, {}))
        self.kinds = sorted(k for k, each in self.plain.rope_parameters.items() if isinstance(each, dict)) or [ALL]

    def described(self) -> dict[str, Any]:
        """The values that are not Llama's."""
        found = {**sizes(self.plain), **self.head_dim()}
        if (original := self.plain.__dict__.get(ORIGINAL)) is not None:
            found["original"] = original
        found |= self.thetas()
        found |= self.partials()
        found |= self.defaults()
        if self.kinds == [ALL]:
            beside = self.parameters(self.made(rope_scaling={**_LINEAR}))
            found |= {"reads_scaling": False} if beside and beside[ALL].get("factor") != 7.0 else {}
        else:
            found |= {"scaled": self.scaled("rope_scaling"), "flat": self.scaled("rope_parameters")}
        found |= self.axes()
        found["only_if"] = SWITCHES.get(self.cls.model_type, {})
        if "hunyuan" in self.cls.model_type:
            found["alpha"] = True
        return {name: value for name, value in found.items() if value is not None and (value or name != "only_if")}

    def parameters(self, config: PreTrainedConfig | None) -> dict[str, dict[str, Any]] | None:
        """The parameters by layer type of a config whose module can be made; None of another."""
        if config is None or turned(config) is None:
            return None
        return {kind: config.rope_parameters[kind] if kind else config.rope_parameters for kind in self.kinds}

    def head_dim(self) -> dict[str, Any]:
        """The width of a head where it does not follow from the two sizes, and the fields that say it."""
        found: dict[str, Any] = {}
        names = dict.fromkeys(("qk_rope_head_dim", *self.aliases("head_dim"), "head_dim"))
        read = [name for name in names if self.reads_width(name)]
        if tuple(read) != _LLAMA.reads_head_dim:
            found["reads_head_dim"] = read
        if self.kinds != [ALL] and (layers := setting(self.plain, "per_layer_config")) is not None:
            with contextlib.suppress(Exception):
                by_kind = {kind: layers[kind].head_dim for kind in self.kinds}
                if len(set(by_kind.values())) > 1:
                    return {**found, "head_dim": by_kind}
        if (width := setting(self.plain, "head_dim")) is None:
            return found
        heads = self.plain.num_attention_heads
        wider = self.made(**{self.plain.attribute_map.get("hidden_size", "hidden_size"): 2 * width * heads})
        return found if wider is not None and wider.head_dim == 2 * width else {**found, "head_dim": width}

    def reads_width(self, name: str) -> bool:
        """Whether this field says the width of what is rotated."""
        config = self.made(**{name: 48}, rope_parameters=None)
        made = None if config is None else turned(config)
        if made is None:  # Gemma 4 has heads of several widths, and an odd width may not load
            return name == "head_dim"
        plain = turned(self.plain) or {}
        pairs = {len(made[kind][0]) for kind in made.keys() & plain.keys() if len(made[kind][0]) != len(plain[kind][0])}
        return pairs == {24} or (bool(pairs) and name != "qk_rope_head_dim")

    def aliases(self, name: str) -> list[str]:
        """Other names of a field."""
        aliases = self.plain.attribute_map
        return [aliases[name]] if name in aliases else [key for key, value in aliases.items() if value == name][:1]

    def made(self, **fields: Any) -> PreTrainedConfig | None:
        """A config that rotates, with these fields; None if the class refuses them."""
        return attempt(self.cls, **SWITCHES.get(self.cls.model_type, {}), **fields)

    def trial(self, **fields: Any) -> dict[str, dict[str, Any]] | None:
        """The parameters with some fields, beside a scaling, which makes room for them; without it if need be."""
        beside = self.parameters(self.made(rope_scaling=dict(_LINEAR), **fields))
        return beside or self.parameters(self.made(**fields))

    def thetas(self) -> dict[str, Any]:
        """The bases, and the names under which the top of a config has them."""
        unsaid = self.parameters(self.made(rope_parameters={kind: {"rope_type": "default"} for kind in self.kinds}))
        plain = self.trial() if self.kinds == [ALL] else unsaid
        bases = {kind: each["rope_theta"] for kind, each in (plain or self.parameters(self.plain) or {}).items()}
        if None in bases.values():
            bases = {kind: each["rope_theta"] for kind, each in (self.parameters(self.plain) or {}).items()}
        read: dict[str, list[str]] = {kind: [] for kind in self.kinds}
        for name in (*THETA, *LOCAL_THETA):
            for kind, each in (self.trial(**{name: _TRIAL}) or {}).items():
                if each["rope_theta"] == _TRIAL:
                    read[kind].append(name)
        if self.kinds != [ALL]:
            return {"theta": bases, "reads_theta": {kind: names for kind, names in read.items() if names}}
        found: dict[str, Any] = {"theta": bases[ALL]} if bases[ALL] != _LLAMA.theta else {}
        return found if tuple(read[ALL]) == _LLAMA.reads_theta else {**found, "reads_theta": read[ALL]}

    def partials(self) -> dict[str, Any]:
        """The share that is rotated, its names at the top of a config, and whether `default` heeds it."""
        whole, half, unsaid = (self.widths(**fields) for fields in ({PARTIAL[0]: 1.0}, {PARTIAL[0]: 0.5}, {}))
        heeds = whole is not None and half is not None and whole != half
        taken = self.parameters(self.with_default()) or {}
        shares = {
            kind: each.get(PARTIAL[0], self.share_in_code() if heeds and unsaid != whole else 1.0)
            for kind, each in taken.items()
        }
        share = next(iter(shares.values()), 1.0) if len(set(shares.values())) < 2 else shares
        read = [name for name in (*PARTIAL, *WIDTHS) if self.reads_share(name)]
        return {
            **({"partial": share} if share != _LLAMA.partial else {}),
            **({"heeds_partial": True} if heeds else {}),
            **({"reads_partial": read} if tuple(read) != _LLAMA.reads_partial else {}),
        }

    def with_default(self, **fields: Any) -> PreTrainedConfig | None:
        """A config with one entry of `default` for each layer type."""
        each = {"rope_type": "default", "rope_theta": 10000.0, **fields}
        return self.made(rope_parameters=each if self.kinds == [ALL] else {kind: {**each} for kind in self.kinds})

    def widths(self, **fields: Any) -> dict[str, int] | None:
        """The pairs that turn under `default` with some fields."""
        config = self.with_default(**fields)
        made = None if config is None else turned(config)
        return None if made is None else {kind: len(found) for kind, (found, _) in made.items()}

    def share_in_code(self) -> float:
        """The share that the module has by default."""
        source = inspect.getsource(rotary_classes(self.plain)[0])
        return float(re.findall(r'get\("partial_rotary_factor", ([\d.]+)\)', source)[0])

    def reads_share(self, name: str) -> bool:
        """Whether this field says the share."""
        share = 0.75
        width = setting(self.plain, "head_dim")
        found = self.trial(**{name: int(share * width) if name in WIDTHS and width else share})
        return any(each.get(PARTIAL[0]) == share for each in (found or {}).values())

    def defaults(self) -> dict[str, Any]:
        """The parameters of a config that has none, where they are not those of a config that has some."""
        plain = self.parameters(self.plain) or {}
        said = {kind: {name: each[name] for name in each if name in ENTRY} for kind, each in plain.items()}
        own = self.thetas().get("theta", _LLAMA.theta)
        beside = self.parameters(self.with_default()) or {}
        changed = any(
            each["rope_type"] != "default"
            or each["rope_theta"] != (own[kind] if kind else own)
            or each.get(PARTIAL[0]) != beside.get(kind, {}).get(PARTIAL[0])
            for kind, each in plain.items()
        )
        if not changed:
            return {}
        for kind, each in (self.parameters(self.made(rope_theta=_TRIAL)) or {}).items():
            if each["rope_theta"] == _TRIAL:
                said[kind].pop("rope_theta", None)
        return {"rope_parameters": said if self.kinds != [ALL] else said[ALL]}

    def scaled(self, name: str) -> list[str] | None:
        """The layer types to which parameters apply that name none; None if they do not load."""
        found = self.parameters(self.made(**{name: {**_LINEAR}}))
        return None if found is None else [kind for kind, each in found.items() if each.get("factor") == 7.0]

    def axes(self) -> dict[str, Any]:
        """The sections of a multimodal model, which its module has by default."""
        module = rotary_classes(self.plain)[0](self.plain)
        sections = getattr(module, "mrope_section", None)
        if not isinstance(sections, list):
            return {}
        source = inspect.getsource(type(module).recomposition_frequencies)
        if "* 3" not in source and "m[i % 3]" not in source:
            return {}  # the axes come in an order of its own
        return {"sections": sections, **({"interleaved": True} if "* 3" in source else {})}


if __name__ == "__main__":
    main()
