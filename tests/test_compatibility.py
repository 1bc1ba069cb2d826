"""The matrix of docs/compatibility.md says what the library does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from rope_patch import RopePatchError, get_scheme, patch
from rope_patch.saving.readers import LLAMA_CPP, VLLM, parameters_for, refused_by_vllm, supported
from tests.families import build

PAGE = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text()
HEAD, _, *ROWS = [
    [cell.strip(" `") for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*$", PAGE, re.MULTILINE)
]
MATRIX = {row[1]: dict(zip(HEAD, row, strict=True)) for row in ROWS}
CELLS = {"yes", "no", "untested", "config", "plugin", "rows only"}


def test_every_kind_and_every_cell_is_known():
    assert {slot for spec in MATRIX for slot in get_scheme(spec).slots} >= {
        "frequencies",
        "segments",
        "query_scale",
        "bias",
        "values",
        "embedding",
    }
    assert {cell.rstrip(" ¹²³") for row in MATRIX.values() for cell in list(row.values())[2:]} <= CELLS


@pytest.mark.parametrize(("words", "reads"), [({"mscale": 0.7}, "yes"), ({"mscale": 0.7, "mscale_all_dim": 0.5}, "no")])
def test_a_temperature_is_one_where_both_of_its_words_are_there(words, reads):
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
    (plain,) = supported(parameters, ["LlamaForCausalLM"], 1024, [LLAMA_CPP])
    (scaled,) = supported(parameters | words, ["LlamaForCausalLM"], 1024, [LLAMA_CPP])
    assert (plain.reads, scaled.reads) == ("yes", reads)


def exported(spec: str, reader) -> bool:
    """Whether a program computes the scheme from the config of a Llama."""
    config = LlamaConfig(max_position_embeddings=256)
    try:
        scheme = get_scheme(spec)
        parameters = parameters_for([reader], scheme, config, ["LlamaForCausalLM"], 1024)
    except RopePatchError:
        return False
    (support,) = supported(parameters, ["LlamaForCausalLM"], 1024, [reader])
    return support.reads != "no"


@pytest.mark.parametrize("spec", MATRIX)
def test_servers_are_those_that_the_library_names(spec):
    row = MATRIX[spec]
    assert (row["llama.cpp"] == "config") == exported(spec, LLAMA_CPP)
    by_vllm = "config" if exported(spec, VLLM) else "no" if refused_by_vllm(get_scheme(spec)) else "plugin"
    assert row["vLLM"].rstrip(" ¹") == by_vllm


@pytest.mark.parametrize("spec", MATRIX)
def test_what_breaks_or_cannot_be_shared_is_what_the_schemes_declare(spec):
    scheme, row, model = get_scheme(spec), MATRIX[spec], build("llama")
    patch(model, spec)
    assert (row["context parallel"] == "no") != model._supports_context_parallel
    assert (row["compile"] == "no") == scheme.breaks_graph
    assert row["batches"].startswith("rows only") == (scheme.stateful or "running_bias" in scheme.methods)
