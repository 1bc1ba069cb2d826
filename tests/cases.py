"""Small settings of every scheme, for models that were trained at 32 tokens, and the compositions worth testing."""

from __future__ import annotations

from rope_patch import get_scheme

CASES = {
    "rope": "rope",
    "nope": "nope",
    "pi": "pi:factor=4",
    "ntk": "ntk:factor=4",
    "abf": "abf:base=500",
    "dynamic_ntk": "dynamic_ntk:factor=2",
    "yarn": "yarn:factor=4",
    "rerope": "rerope:window=6",
    "leaky_rerope": "leaky_rerope:window=6,factor=4",
    "self_extend": "self_extend:group_size=4,window=7",
    "window": "window:window=7",
    "logn": "logn:training_length=8",
    "alibi": "alibi",
    "ntk_by_parts": "ntk_by_parts:factor=4",
    "ntk_mixed": "ntk_mixed:factor=4",
    "dynamic_yarn": "dynamic_yarn",
    "llama3": "llama3:factor=4",
    "longrope": "longrope:short_factor=[1,1,1,1,1.5,1.5,2,2],long_factor=[1,1.5,2,3,4,5,6,8],factor=4",
    "proportional": "proportional:partial_rotary_factor=0.5,factor=2",
    "xpos": "xpos:scale_base=8",
    "sandwich": "sandwich:embedding_dim=16,base=100",
    "giraffe": "giraffe:cutoff_length=32",
    "lm_infinite": "lm_infinite:local_window=7,n_global=3",
    "dca": "dca:chunk_size=9,local_window=2",
    "t5": "t5:interpolation=2",
    "sinusoidal": "sinusoidal",
    "learned": "learned:extend=40",
    "hierarchical": "hierarchical",
}
"""Registry name to the settings that the contract suite runs; a new scheme needs no more than a line here."""

COMPOSITIONS = [
    "rerope:window=6+logn:training_length=8",
    "ntk:factor=4+logn:training_length=8",
    "yarn:factor=4+rerope:window=6",
    "dynamic_ntk:factor=2+leaky_rerope:window=6,factor=4",
    "rope+alibi",
    "alibi+window:window=7",
    "rope+sandwich:embedding_dim=16,base=100",
    "xpos:scale_base=8+rerope:window=6",
]


def fits_rotary(spec: str) -> bool:
    """Whether a scheme can be mounted on a model that has nothing but a rotary embedding."""
    scheme = get_scheme(spec)
    return not scheme.learned and "embedding" not in scheme.slots


ALL = [spec for spec in (*CASES.values(), *COMPOSITIONS) if fits_rotary(spec)]
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
    )
] + COMPOSITIONS
"""One of each kind, for every family."""

ROUTES = [CASES["yarn"], CASES["rerope"], CASES["logn"], CASES["alibi"], COMPOSITIONS[2]]
"""One of each way to be executed: rotary, late by regions, delegated, biased, late with frequencies of its own."""
