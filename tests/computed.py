"""What models compute under every scheme, as `python -m tests.before_after` compares it between two checkouts."""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

import rope_patch
from tests import families
from tests.cases import ALL
from tests.models import absolute_families, t5_families

LENGTH = families.TRAINING_LENGTH + 9
LONG = 520  # tokens: one dense block would hold too many pairs
DECODED = 3

UNTRAINED = {"allow_untrained": True} if "allow_untrained" in inspect.signature(rope_patch.patch).parameters else {}
"""The argument that lets T5 carry a scaled rotation, which older checkouts do without it."""

Cell = dict[str, Any]
"""What one model computes under one scheme: a tensor or a text for each thing."""


def texts(vocabulary: int, length: int, rows: int = 1) -> torch.Tensor:
    """Random token ids, none of which is special, `(rows, length)`."""
    return torch.randint(4, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))


def decoder(model: nn.Module) -> Cell:
    """A model that continues texts. Rows of a batch have pads on the left, where `padded` is said, and their positions
    count tokens, as in `generate`.
    """
    ids = texts(families.VOCABULARY, LENGTH, rows=2)
    mask = (torch.arange(LENGTH) >= torch.tensor([[5], [0]])).long()
    padded = {"attention_mask": mask, "position_ids": (mask.cumsum(dim=-1) - 1).clamp(min=0), "use_cache": False}
    long = texts(families.VOCABULARY, LONG)
    cell: Cell = {}
    with torch.no_grad():
        cell["logits"] = model(ids, use_cache=False).logits
        cell["padded logits"] = model(ids, **padded).logits[mask.bool()]
        cell["decoded logits"] = _decoded(model, ids)
        cell["long logits"] = _decoded(model, long)
        cell["tokens"] = _generated(model, ids.where(mask.bool(), 0), attention_mask=mask)
        cell["static tokens"] = _generated(model, ids[:1], 3, cache_implementation="static")
    return cell | _gradients(model, lambda: model(ids, labels=ids.where(mask.bool(), -100), **padded).loss)


def sequence_to_sequence(model: nn.Module) -> Cell:
    """A model that answers texts."""
    ids = texts(families.VOCABULARY, LENGTH, rows=2)
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH - 5], [LENGTH]])).long()
    with torch.no_grad():
        cell: Cell = {
            "logits": model(ids, mask, labels=ids).logits,
            "tokens": _generated(model, ids, attention_mask=mask),
            "static tokens": _generated(model, ids, 3, attention_mask=mask, cache_implementation="static"),
        }
    return cell | _gradients(model, lambda: model(ids, mask, labels=ids).loss)


def encoder(model: nn.Module) -> Cell:
    """A model that reads texts in both directions."""
    ids = texts(absolute_families.VOCABULARY, 3 * absolute_families.CAPACITY, rows=2)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[20], [24]])).long()
    with torch.no_grad():
        cell: Cell = {"logits": model(ids)[0], "padded logits": model(ids, mask)[0][mask.bool()]}
    return cell | _gradients(model, lambda: (model(ids, mask)[0] ** 2).mean())


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Cell]]] = {
    **{
        name: ((lambda name=name: families.build(name)), decoder)
        for name in (
            *("llama", "qwen2", "gemma2", "gemma3", "phi", "gpt_neox", "deepseek_v3", "gpt_oss"),
            *("baichuan", "baichuan_alibi"),
        )
        if name in families.FAMILIES
    },
    "t5": (t5_families.build, sequence_to_sequence),
    "bert": (lambda: absolute_families.build("bert"), encoder),
}
"""Family to what makes its model, and what is computed with it."""


def computed(family: str, spec: str, dtype: torch.dtype) -> Cell:
    """Compute the cell of a family under a scheme. A refusal is the class of its error alone, because texts change."""
    build, compute = FAMILIES[family]
    model = copy.deepcopy(build()).to(dtype)
    try:
        rope_patch.patch(model, spec, **UNTRAINED)
        _learn(model)
        return compute(model)
    except rope_patch.RopePatchError as error:
        return {"refused": type(error).__name__}


def _learn(model: nn.Module) -> None:
    """Move what the scheme learns away from where it changes little."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "rope_patch" in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                value += 0.2 * torch.randn(value.shape, generator=generator).to(value)


def _decoded(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a prefill and of tokens that follow it one by one."""
    start, cache, found = 0, None, []
    for stop in range(ids.shape[1] - DECODED, ids.shape[1] + 1):
        output = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
        start, cache = stop, output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1)


def _generated(model: nn.Module, ids: torch.Tensor, new: int = 6, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new, do_sample=False, **options)


def _gradients(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Cell:
    model.zero_grad(set_to_none=True)
    loss().backward()
    parameters = model.named_parameters()
    return {f"gradient of {name}": value.grad for name, value in parameters if value.grad is not None}


def main() -> None:
    """Store what each family computes: one file a family."""
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--cases", nargs="+", default=ALL)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", rope_patch.RopePatchWarning)
    torch.set_num_threads(1)
    for family in options.families:
        cells = {spec: computed(family, spec, getattr(torch, options.dtype)) for spec in options.cases}
        print(f"{family}: {len(cells)} cases", file=sys.stderr)
        torch.save(cells, options.folder / f"{family}.pt")


if __name__ == "__main__":
    main()
