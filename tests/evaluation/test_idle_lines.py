"""A line that measures the plain checkpoint once more is named."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rope_patch import RopePatchWarning
from rope_patch.cli import main

from .conftest import measure


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A tiny Llama with L = 512."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=512, **sizes)).eval()


def rows_of(model, spec, lengths):
    corpus = [{"name": "a", "input_ids": torch.randint(97, (1200,), generator=torch.Generator().manual_seed(0))}]
    return measure(model, None, corpus, ["plain", spec], lengths, targets=8, windows_per_document=1)


@pytest.mark.parametrize(
    ("spec", "lengths", "longest"),
    [
        ("rerope:window=1024", [512, 1024], 1024),
        ("rerope:window=900", [512, 700, 1100], 700),  # the last row is another
        ("layers:[0=rerope:window=1024;rest=none]", [512, 1024], 1024),
        ("yarn:factor=1", [256], 256),
        ("logn", [256, 512], 512),
    ],
)
def test_a_line_that_measures_the_plain_checkpoint_is_named(spec, lengths, longest, model):
    with pytest.warns(RopePatchWarning) as caught:
        rows = rows_of(model, spec, lengths)
    said = f"{spec} changes nothing in texts of up to {longest} tokens: its rows up to there equal those of the plain"
    assert [str(warning.message) for warning in caught] == [f"{said} checkpoint"]
    plain, line = rows[: len(lengths)], rows[len(lengths) :]
    equal = [
        one.length for one, other in zip(plain, line, strict=True) if one.nll == pytest.approx(other.nll, abs=1e-6)
    ]
    assert equal == [length for length in lengths if length <= longest]


@pytest.mark.parametrize(
    "spec", ["rerope:window=100", "yarn:target=auto", "logn", "window", "self_extend:group_size=2,window=256"]
)
def test_a_line_that_measures_something_is_not(spec, model):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RopePatchWarning)
        rows_of(model, spec, [512, 1024])


@pytest.mark.parametrize("command", ["perplexity", "passkey"])
def test_a_measuring_command_names_it_in_one_line(command, tmp_path, capsys):
    words = ["--scheme", "rerope:window=1024", "--lengths", "96", "--no-references", "--output", str(tmp_path)]
    few = {"perplexity": ["--documents", "1", "--targets", "8", "--windows-per-document", "1"]}
    few["passkey"] = ["--task", "spans", "--span", "8", "--trials", "1", "--depths", "1"]
    assert main([command, *words, *few[command]]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "changes nothing" in line]
    assert said == [
        "rope-patch: rerope:window=1024 changes nothing in texts of up to 96 tokens: its rows up to there equal those "
        "of the plain checkpoint"
    ]
