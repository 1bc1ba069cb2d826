"""Small settings of every scheme, for models that were trained at 32 tokens, and the compositions worth testing.

Those of a scheme are in its own tests: `CASES` of `tests/schemes/test_<name>.py`, named after its file. They are read
there and not imported, since those tests import what is built on this module.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from rope_patch.schemes import list_schemes, scheme_class


def home_of(name: str) -> Path:
    """The file with the tests of a registered scheme, whether or not it is there."""
    module = scheme_class(name).__module__.rpartition(".")[2]
    return Path(__file__).parent / "schemes" / f"test_{module}.py"


def declared(name: str, what: str, default: Any) -> Any:
    """The literal that the tests of a scheme assign to `what` at the level of their module."""
    path = home_of(name)
    for statement in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == what:
            return ast.literal_eval(statement.value)
    return default


def settings_of(name: str) -> list[str]:
    """The `CASES` of one scheme; other schemes of its file have lines there too."""
    return [spec for spec in declared(name, "CASES", []) if spec.partition(":")[0] == name]


def what_is_missing(name: str) -> str:
    """What the author of a scheme without settings is told."""
    return f'no settings of {name} to test: add CASES = ["{name}:FIELD=VALUE"] to tests/schemes/{home_of(name).name}'


_SETTINGS = {name: settings for name in list_schemes() if (settings := settings_of(name))}

CASES = {name: settings[0] for name, settings in _SETTINGS.items()}
"""Registry name to the first of its settings, which the whole contract suite runs."""

COMPOSITIONS = [
    "rerope:window=6+logn:training_length=8",
    "ntk:factor=4+logn:training_length=8",
    "yarn:factor=4+rerope:window=6",
    "dynamic_ntk:factor=2+leaky_rerope:window=6,factor=4",
    "rope+alibi",
    "alibi+window:window=7",
    "rope+sandwich:embedding_dim=16,base=100",
    "xpos:scale_base=8+rerope:window=6",
    "rerope:window=6+alibi",
]

VARIANTS = [
    *(spec for settings in _SETTINGS.values() for spec in settings[1:]),
    "rope+xl:initial_std=0.02+logn:training_length=8",
    "rerope:window=6+shaw:max_distance=6",
    "sinusoidal+alibi+urpe:max_distance=12",
    "dca:chunk_size=9,local_window=2+alibi",
    "self_extend:group_size=4,window=7+t5",
    "dynamic_ntk:factor=2+dca:chunk_size=9,local_window=2",
]
"""Further settings of single schemes, and compositions in which something learned or a bias is involved."""

QUIET = {
    "rope+t5": 2e-5,
    "rope+shaw": 2e-5,
    "rope+cope": 2e-5,
    "urpe": 2e-5,
    "rope+multiplicative:num_positions=700": 2e-5,
    "rope+complex_order:start=zeros": 2e-5,
    "rope+learned:num_positions=700": 2e-5,
    "rope+kerple": 0.1,
    "rope+fire": 0.1,
    "rope+xl": 0.1,
    "rope+deberta:scaled=false": 0.1,
    "rope+floater": 0.1,
    "rope+rnn": 0.1,
}
"""Schemes whose learned parameters start so that little changes, and by how much logits may differ."""

ALL = [*CASES.values(), *COMPOSITIONS, *VARIANTS]
"""What the contract holds for on every Llama-style family."""

REPRESENTATIVE = [
    CASES[name]
    for name in (
        "rope",
        "yarn",
        "dynamic_ntk",
        "rerope",
        "leaky_rerope",
        "self_extend",
        "window",
        "logn",
        "alibi",
        "nope",
        "shaw",
        "cope",
        "sinusoidal",
        "rnn",
    )
] + COMPOSITIONS
"""One of each kind, for every family."""

ROUTES = [CASES["yarn"], CASES["rerope"], CASES["logn"], CASES["alibi"], COMPOSITIONS[2]]
"""One of each way to be executed: rotary, late by regions, delegated, biased, late with frequencies of its own."""
