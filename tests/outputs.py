"""Outputs of patched models as hashes: `python -m tests.outputs FILE` writes them, or compares with them.

A change that only moves code keeps every bit. Write the file before the change and compare after it, on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from rope_patch import RopePatchError, patch
from tests.cases import CASES, COMPOSITIONS, REPRESENTATIVE
from tests.families import build
from tests.runs import cached_logits, generated, gradients, left_padded, logits, positions_of, tokens

FAMILIES = (
    "llama",
    "gemma3",
    "gpt_neox",
    "qwen3_5_text",
    "llama4_text",
    "baichuan_alibi",
    "llama_yarn",
    "llama_longrope",
    "deepseek_v3",
    "mixtral",
)
LONG = 700
"""Tokens of a text that the fast paths take."""


def _hash(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _padded(model: PreTrainedModel) -> torch.Tensor:
    ids, mask = left_padded([tokens(40)[0], tokens(25, seed=1)[0], tokens(31, seed=2)[0]])
    return logits(model, ids, attention_mask=mask, position_ids=positions_of(mask))[mask.bool()]


SITUATIONS: dict[str, Callable[[PreTrainedModel], tuple[torch.Tensor, ...]]] = {
    "text": lambda model: (logits(model, tokens()),),
    "long": lambda model: (logits(model, tokens(LONG)),),
    "pads": lambda model: (_padded(model),),
    "cache": lambda model: (cached_logits(model, tokens(rows=2), [20, 1, 5, 1, 13]),),
    "generate": lambda model: (generated(model, tokens(30, rows=2), 6),),
    "gradients": lambda model: tuple(grad for grad in gradients(model, tokens()).values() if grad is not None),
    "bfloat16": lambda model: (logits(model.bfloat16(), tokens(LONG)),),
}
MODES = ("auto", "oracle", "chunked", "segmented")


def _outputs() -> Iterator[tuple[str, Callable[[], tuple[torch.Tensor, ...]]]]:
    for family in FAMILIES:
        for spec in [*CASES.values(), *COMPOSITIONS] if family == "llama" else REPRESENTATIVE:
            for mode in MODES if family == "llama" and spec in REPRESENTATIVE else MODES[:1]:
                for name, run in SITUATIONS.items():

                    def output(family=family, spec=spec, mode=mode, run=run) -> tuple[torch.Tensor, ...]:
                        model = build(family)
                        patch(model, spec, attention=mode)
                        return run(model)

                    yield f"{family} {spec} {mode} {name}", output


def hashes() -> dict[str, str]:
    """One hash for each family, scheme, mode and situation; for a refusal, the class of its error."""
    found = {}
    for name, output in tqdm(list(_outputs())):
        try:
            found[name] = _hash(*output())
        except (RopePatchError, ValueError, NotImplementedError) as error:
            found[name] = type(error).__name__
    return found


def main() -> None:
    """Write the hashes, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    if not path.exists():
        path.write_text(json.dumps(hashes(), indent=1) + "\n", encoding="utf-8")
        return
    before, after = json.loads(path.read_text(encoding="utf-8")), hashes()
    different = [name for name in before if after.get(name) != before[name]]
    print(*(f"{name}: {before[name]} -> {after.get(name)}" for name in different), sep="\n")
    print(f"{len(before) - len(different)} of {len(before)} outputs are equal")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
