"""How long a text `rope-patch serve` announces under a scheme."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from rope_patch import patch
from rope_patch.models.find_stacks import read_stack
from rope_patch.saving.loading import default_checkpoint
from tests.recipes import load_recipe

REACHED = {
    None: 256,
    "yarn:factor=2": 512,
    "pi:factor=1.5": 384,
    "ntk:factor=8": 2048,
    "yarn:factor=2+logn": 512,
    "rerope:window=64": 1024,
    "yarn:factor=2+rerope:window=64": 1024,
    "self_extend:group_size=2,window=128": 384,
    "dynamic_ntk": 1024,
    "lm_infinite:local_window=64": 1024,
    "alibi": 1024,
    "hierarchical": 1024,  # and not L squared
    "hierarchical:num_positions=300": 300,
    "yarn_full:factor=2": 512,
    "layers:[0=yarn:factor=2;rest=rerope:window=64]": 512,
}


@pytest.mark.parametrize("spec", REACHED)
def test_a_server_announces_what_a_scheme_reaches(spec):
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint())
    checkpoint = read_stack(model).checkpoint
    handle = None if spec is None else patch(model, spec)
    assert load_recipe("serve").longest_text(handle, checkpoint) == REACHED[spec]
