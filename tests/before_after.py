"""Compares what models compute in this checkout and in another one, such as the commit before a change.

    python -m tests.before_after CHECKOUT [--families NAME ...] [--cases SPEC ...] [--dtype float32]

Tiny models of twelve families, with the same weights, run under every case of `tests.cases`: logits of texts and of
padded batches, of a long text and of tokens that follow a cache, all gradients, and greedy tokens with a growing and a
static cache (`tests/computed.py`). It prints how much is equal bit for bit, and lists what is not, with the largest
difference relative to the largest number. It fails where one is above rounding, or where a token or the class of an
error differs.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import checkouts
from tests.cases import ALL
from tests.computed import FAMILIES, Cell

ROUNDING = {"logits": 1e-5, "gradient": 1e-4}
"""The largest relative difference that rounding explains in float32."""


@dataclass(frozen=True)
class Compared:
    """One thing that a family computed under a scheme on both sides.

    Attributes:
        relative: the largest difference, divided by the largest number; 0 where all bits are equal, infinite where
            texts, tokens or shapes differ.
    """

    family: str
    spec: str
    what: str
    equal: bool
    relative: float

    @property
    def kind(self) -> str:
        """Gradients are one kind, whichever parameter they are of."""
        return "gradient" if self.what.startswith("gradient") else self.what

    def above_rounding(self, dtype: torch.dtype) -> bool:
        """Whether rounding does not explain the difference."""
        limit = ROUNDING["gradient" if self.kind == "gradient" else "logits"]
        return not self.relative <= limit * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps


def compared(family: str, spec: str, before: Cell, after: Cell) -> list[Compared]:
    """All that was computed on at least one side; nothing where the checkout before does not know the scheme."""
    if before.get("refused") == "UnknownScheme":
        return []
    found = []
    for what in dict.fromkeys([*before, *after]):
        old, new = before.get(what), after.get(what)
        equal = _equal(old, new)
        found.append(Compared(family, spec, what, equal, 0.0 if equal else _relative(old, new)))
    return found


def _equal(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return type(old) is type(new) and bool(old == new)
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (old, new)))


def _relative(old: Any, new: Any) -> float:
    comparable = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.shape == new.shape
    if not comparable or not old.is_floating_point() or not torch.equal(old.isfinite(), new.isfinite()):
        return math.inf
    finite = old.isfinite()
    before, after = old[finite].double(), new[finite].double()
    if before.numel() == 0 or torch.equal(before, after):
        return 0.0  # zeros have two signs
    return float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))


def report(found: list[Compared], dtype: torch.dtype) -> tuple[str, bool]:
    """What is printed, and whether all differences are rounding."""
    total, equal = Counter(each.kind for each in found), Counter(each.kind for each in found if each.equal)
    lines = [f"{kind}: {equal[kind]} of {number} equal bit for bit" for kind, number in total.items()]
    worst: dict[tuple[str, str, str], Compared] = {}
    for each in sorted((each for each in found if not each.equal), key=lambda each: -each.relative):
        worst.setdefault((each.family, each.spec, each.kind), each)
    if worst:
        lines += ["", "The largest differences, relative to the largest number:"]
    for each in worst.values():
        mark = "  ABOVE ROUNDING" if each.above_rounding(dtype) else ""
        lines.append(f"{each.relative:.1e}  {each.family}, {each.spec}: {each.what}{mark}")
    above = sum(each.above_rounding(dtype) for each in found)
    lines += ["", f"{len(found)} compared, {sum(total.values()) - sum(equal.values())} differ, {above} above rounding"]
    return "\n".join(lines), not above


def main() -> int:
    """Run both checkouts, and compare."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.before_after",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path, help="the root of the other checkout")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--cases", nargs="+", metavar="SPEC", default=ALL)
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    arguments = ["--families", *options.families, "--cases", *options.cases, "--dtype", options.dtype]
    found: list[Compared] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, root in (("before", options.checkout), ("after", checkouts.ROOT)):
            place = Path(folder, name)
            place.mkdir()
            checkouts.run("tests.computed", root, str(place), *arguments)
        for family in options.families:
            before, after = (torch.load(Path(folder, name, f"{family}.pt")) for name in ("before", "after"))
            for spec in options.cases:
                found += compared(family, spec, before[spec], after[spec])
    text, rounding = report(found, getattr(torch, options.dtype))
    print(text)
    return 0 if rounding else 1


if __name__ == "__main__":
    sys.exit(main())
