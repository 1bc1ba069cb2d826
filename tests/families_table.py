"""What becomes of every causal model type of Transformers: `python -m tests.families_table > docs/families.md`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from rope_patch import RopePatchError, patch
from tests.families import FAMILIES, GENERIC, from_config
from tests.runs import generated, logits, tokens

PASSES = "passes"
_LARGEST = 40_000_000
_SCHEME = "rerope:window=6"
_ROWS = "hierarchical"
_VERSION = "Transformers "

_HEAD = f"""# Families

What becomes of every model type that `AutoModelForCausalLM` knows, with {_VERSION}{{version}}, and of this library's
own Baichuan. Written by `python -m tests.families_table > docs/families.md`; nothing in it is typed by hand. T5-style
encoders and decoders, and the tables of BERT-likes, have suites of their own (`tests/models`).

- **{PASSES}**: the contract suite holds for a tiny random model of it (`pytest --all-families tests/contract`).
- **patched**: a tiny random model takes `{_SCHEME}` and runs under it; nothing more is known.
- **table**: it adds a table of learned positions (as BERT, GPT-2 and OPT do): a tiny random model runs under
  `{_ROWS}` ([tables of positions](absolute.md)).
- **refused**: the error names the reason, and the model stays as it was.
- **not built**: no tiny random model came out of the settings that the others share.

{{counts}}

| model type | | reason |
|---|---|---|
"""


def table() -> str:
    """The whole document."""
    own = {values["model_type"] for values in FAMILIES.values()}  # Baichuan is this library's
    rows = [(model_type, *outcome(model_type)) for model_type in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *own})]
    found = [row[1] for row in rows]
    counts = ", ".join(f"{found.count(kind)} {kind}" for kind in (PASSES, "patched", "table", "refused", "not built"))
    head = _HEAD.format(version=transformers.__version__, counts=f"Of {len(rows)} types: {counts}.")
    return head + "".join(f"| `{model_type}` | {kind} | {reason} |\n" for model_type, kind, reason in rows)


def passing(document: str) -> set[str]:
    """The model types for which a document states that the contract holds."""
    return {row.split("`")[1] for row in document.splitlines() if row.endswith(f" | {PASSES} |  |")}


def version(document: str) -> str:
    """The version of Transformers that a document was written with."""
    return document.split(_VERSION)[1].split(", ")[0]


def outcome(model_type: str) -> tuple[str, str]:
    """What becomes of a model type, and why."""
    if model_type in {values["model_type"] for values in FAMILIES.values()}:
        return PASSES, ""
    outcomes = [_attempt(model_type, values) for values in _attempts()]
    return min(
        outcomes, key=lambda found: (("patched", "table", "refused", "not built").index(found[0]), found[1] != "")
    )


def _attempt(model_type: str, values: dict[str, Any]) -> tuple[str, str]:
    try:
        config = AutoConfig.for_model(model_type, **copy.deepcopy(values))
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(copy.deepcopy(config)).num_parameters()
        if size > _LARGEST:
            return "not built", f"{size / 1e6:,.0f} million parameters are left, in parts with sizes of their own"
        model = from_config(config)
    except Exception as error:  # every config class has requirements of its own
        return "not built", _named(error)
    try:
        with patch(model, _SCHEME):
            logits(model, tokens())
            _decode(model)
    except RopePatchError as error:
        return ("table", "") if _takes_rows(model) else ("refused", _first_sentence(str(error)))
    except Exception as error:  # of the model, which may want more than token ids
        return "patched", f"but not run: {_named(error)}"
    return "patched", ""


def _takes_rows(model: PreTrainedModel) -> bool:
    """Whether the model has a table of positions, and runs under another."""
    try:
        with patch(model, _ROWS):
            logits(model, tokens())
    except Exception:  # as a model that a scheme does not fit, or of the model itself
        return False
    return True


def _decode(model: PreTrainedModel) -> None:
    """A few tokens with a cache, which shows where keys are kept; what a family itself cannot do is no reason."""
    try:
        generated(model, tokens(8), 2)
    except RopePatchError:
        raise
    except Exception:
        return


def _attempts() -> Iterator[dict[str, Any]]:
    """Values that most config classes take, then values for some of the others."""
    yield GENERIC
    named = {key: value for key, value in GENERIC.items() if value is not None}
    yield named
    yield {key: value for key, value in named.items() if not key.endswith("head_dim")}
    yield {**named, "is_decoder": True, "num_experts_per_tok": 1}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_sentence(str(error).rpartition('Error: ')[2])}"


def _first_sentence(text: str) -> str:
    text = " ".join(text.split())
    for end in ("; ", ". "):
        text = text.partition(end)[0]
    return text.replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    logging.set_verbosity_error()
    print(table(), end="")
