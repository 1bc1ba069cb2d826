"""What `rope-patch serve` reads from a scheme, and from a folder with a scheme for each factor."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import RopePatchWarning, patch
from rope_patch.cli import main
from rope_patch.models.find_stacks import read_stack
from rope_patch.mounting.longest_text import longest_text
from rope_patch.saving.loading import default_checkpoint
from tests.test_serve import NEW, TEXT, client_of, complete, server

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
    assert longest_text(handle, checkpoint) == REACHED[spec]


@torch.no_grad()
def test_a_folder_with_factors_needs_no_flags(tmp_path):
    words = ["export", default_checkpoint(), "--scheme", "yarn:target=auto", "--factors", "1,2,4"]
    main([*words, "--output", str(tmp_path / "many")])
    ids = AutoTokenizer.from_pretrained(default_checkpoint())(TEXT).input_ids
    with server(tmp_path / "many") as (address, _):
        answers = {factor: complete(client_of(address), ids[: 200 * factor], logprobs=0) for factor in (1, 2, 4)}
    for factor, answer in answers.items():
        model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RopePatchWarning)  # a factor of 1 changes nothing
            patch(model, "yarn", factor=factor)
        row = model.generate(torch.tensor([ids[: 200 * factor]]), max_new_tokens=NEW, do_sample=False)
        expected = model(row).logits[0, 200 * factor - 1 : -1].log_softmax(-1)
        expected = expected.gather(1, row[0, 200 * factor :, None])[:, 0]
        found = torch.tensor(answer.choices[0].logprobs.token_logprobs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
