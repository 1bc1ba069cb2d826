"""Small settings of every scheme, for models that were trained at 32 tokens, and the compositions worth testing."""

from __future__ import annotations

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
    "learned": "learned:num_positions=700",
    "hierarchical": "hierarchical",
    "floater": "floater:width=16",
    "complex_order": "complex_order",
    "multiplicative": "multiplicative:num_positions=700",
    "rnn": "rnn:width=16",
    "shaw": "shaw:max_distance=6",
    "xl": "xl:initial_std=0.02",
    "deberta": "deberta:max_distance=12",
    "cope": "cope:max_positions=12",
    "urpe": "urpe:max_distance=12",
    "kerple": "kerple:initial_scale=1",
    "fire": "fire:width=8,initial_scale=1,threshold=8",
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
    "rerope:window=6+alibi",
]

VARIANTS = [
    "alibi:learned=true",
    "t5:per_layer=true",
    "shaw:max_distance=6,shared_heads=false,per_layer=false",
    "deberta:max_distance=12,terms=[c2p],absolute_layers=1,num_positions=700",
    "floater:width=16,blocks=true",
    "rope+xl:initial_std=0.02+logn:training_length=8",
    "rerope:window=6+shaw:max_distance=6",
    "sinusoidal+alibi+urpe:max_distance=12",
    "dca:chunk_size=9,local_window=2+alibi",
    "self_extend:group_size=4,window=7+t5",
]


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
