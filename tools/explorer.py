"""Write what docs/explorer.html knows of schemes and models: `make lists`, or

    python -m tools.explorer

The page has the formulas itself (tests/tools/test_explorer.py compares them with the library). Titles, equations,
fields, defaults and rules are those of the registry; they stand in the page between `<script id="facts">` and its end.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from rope_patch.cli.options import run
from rope_patch.schemes import Scheme, scheme_class
from rope_patch.schemes.base import TRAINING
from rope_patch.schemes.rules import Bound, rules_of

PAGE = Path(__file__).parents[1] / "docs" / "explorer.html"
FACTS = re.compile(r'(?<=<script id="facts">\n).*?(?=</script>)', re.DOTALL)

SCHEMES = {
    "the rotation": ("rope", "nope", "xpos", "proportional"),
    "slower pairs": ("pi", "ntk", "ntk_mixed", "ntk_by_parts", "yarn", "mrrope", "longrope"),
    "slower with the length": ("dynamic_ntk", "dynamic_yarn"),
    "slower pairs, to train with": ("llama3", "abf", "giraffe", "giraffe_power", "clip", "fope_cut", "resonance"),
    "other distances": ("rerope", "leaky_rerope", "self_extend", "dpe", "dca", "string", "lm_infinite", "window"),
    "a bias instead": ("alibi", "kerple", "sandwich", "t5"),
    "sharper attention": ("logn", "ssmax"),
}
"""The schemes that the page draws, by what they do; the others read tokens or learn what they add."""

WITHOUT_A_PICTURE = ("learned", "mixed", "per_layer", "symmetric", "bidirectional")
"""Fields that change nothing in one text of a causal model before it is trained."""

MODELS = (  # config.json of each: max_position_embeddings, rope_theta, head_dim, num_attention_heads
    {"name": "Llama-2-7B", "L": 4096, "theta": 10_000, "d": 128, "heads": 32},
    {"name": "Llama-3-8B", "L": 8192, "theta": 500_000, "d": 128, "heads": 32},
    {"name": "Qwen2.5-7B", "L": 32768, "theta": 1_000_000, "d": 128, "heads": 28},
    {"name": "SmolLM2-135M", "L": 8192, "theta": 100_000, "d": 64, "heads": 9},
    {"name": "TinyLlama-1.1B", "L": 2048, "theta": 10_000, "d": 64, "heads": 32},
    {"name": "recipes/assets/tiny-llama", "L": 256, "theta": 10_000, "d": 64, "heads": 4},
)


@dataclasses.dataclass(kw_only=True)
class Options:
    pass


def main(options: Options) -> None:
    """Write the facts into the page."""
    PAGE.write_text(with_facts(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


def with_facts(page: str) -> str:
    """The page with the facts of today, a line for each scheme."""
    kinds = {kind: list(names) for kind, names in SCHEMES.items()}
    schemes = [f"{json.dumps(name)}: {json.dumps(facts_of(name))}" for names in kinds.values() for name in names]
    lines = [
        "// Written by `make lists` from the registry: do not edit.",
        f"const MODELS = {json.dumps(MODELS)};",
        f"const KINDS = {json.dumps(kinds)};",
        "const FACTS = {",
        *(f"{line}," for line in schemes),
        "};",
    ]
    return FACTS.sub(lambda _: "\n".join(lines) + "\n", page, count=1)


def facts_of(name: str) -> dict[str, Any]:
    """What the page says about a scheme, and what it checks."""
    kind = scheme_class(name)
    return {
        "title": getattr(kind, "title", kind.__name__),
        "summary": kind.summary,
        "equation": kind.equation,
        "needs": TRAINING[kind.regime],
        "source": f"{kind.source.title}, {kind.source.year}",
        "slots": sorted(slot for slot in ("bias", "frequencies", "query_scale", "segments") if _fills(kind, slot)),
        "fields": fields_of(kind),
    }


def fields_of(kind: type[Scheme]) -> list[dict[str, Any]]:
    """Each field with its default, None where it is required or left to the checkpoint, and its rule."""
    rules, found = rules_of(kind), []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in WITHOUT_A_PICTURE:
            continue
        rule, required = rules[field.name], field.default is dataclasses.MISSING
        found.append(
            {
                "name": field.name,
                "kind": rule.kind.__name__,
                "required": required,
                "default": None if required else field.default,
                "allowed": rule.allowed(),
                "rules": [[type(each).__name__, *_values(each)] for each in rule.rules],
            }
        )
    return found


def _fills(kind: type[Scheme], method: str) -> bool:
    methods = (method, "refine") if method == "frequencies" else (method,)
    return any(getattr(kind, each) is not getattr(Scheme, each) for each in methods)


def _values(rule: Any) -> list[Any]:
    return [rule.bound] if isinstance(rule, Bound) else list(dataclasses.asdict(rule).values())


if __name__ == "__main__":
    run(Options, main)
