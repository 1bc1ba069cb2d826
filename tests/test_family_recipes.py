"""recipes/configs/families: values follow from L, and every line runs on a tiny random model of that type."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rope_patch import RopePatchWarning, describe, get_scheme, patch, plan_mounts, unpatch
from rope_patch.cli import main
from rope_patch.models.find_stacks import read_stacks
from rope_patch.schemes.base import Scheme
from tests.runs import assert_close, generated, greedy, logits, tokens
from tests.snapshots import snapshot

FOLDER = Path(__file__).parents[1] / "recipes" / "configs" / "families"
PLANS = sorted(FOLDER.glob("*.yaml"))
SHORT = 256
"""L of the models on which the lines run beyond their length."""

_SIZES = {
    **{"hidden_size": 32, "intermediate_size": 32, "vocab_size": 97, "head_dim": 16, "initializer_range": 0.2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False},
}
_FIVE_TO_ONE = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}


class Published(NamedTuple):
    """Positions of a checkpoint as its config has them, the length that its makers name, and how far the plan goes.

    Attributes:
        values: fields of the config; the lengths among them are divided for a shorter model.
        scaled: type and factor of its own scaling.
        trained: L in tokens, which the checkpoint reads as it is.
        times: the longest text of the plan over L.
        left_alone: layers that see the last tokens only.
    """

    kind: str
    values: dict[str, Any]
    scaled: dict[str, Any] | None
    trained: int
    times: int
    left_alone: int = 0


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHECKPOINTS = {
    "llama-3-8b": Published("llama", {"max_position_embeddings": 8192, "rope_theta": 5e5}, None, 8192, 2),
    "llama-3.1-8b": Published(
        "llama",
        {"max_position_embeddings": 131072, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
        _LLAMA3,
        131072,
        2,
    ),
    "qwen3-8b": Published("qwen3", {"max_position_embeddings": 40960, "rope_theta": 1e6}, None, 32768, 4),
    "gemma-3-1b": Published(
        "gemma3_text",
        {"max_position_embeddings": 32768, "sliding_window": 512, "rope_theta": 1e6, **_FIVE_TO_ONE},
        None,
        32768,
        2,
        left_alone=5,
    ),
    "gemma-3-4b": Published(
        "gemma3_text",
        {"max_position_embeddings": 131072, "sliding_window": 1024, "rope_theta": 1e6, **_FIVE_TO_ONE},
        {"rope_type": "linear", "factor": 8.0},
        131072,
        2,
        left_alone=5,
    ),
}
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window")
IN_TOKENS = ("window", "chunk_size", "local_window", "training_length", "original_max_position_embeddings")
LINES = [(path.stem, spec) for path in PLANS for spec in yaml.safe_load(path.read_text())["schemes"]]


def build(name: str, divisor: int = 1) -> PreTrainedModel:
    """A tiny random model with the positions of a checkpoint, all lengths divided."""
    published = CHECKPOINTS[name]
    values = {key: value // divisor if key in LENGTHS else value for key, value in published.values.items()}
    original = values.pop("original_max_position_embeddings", None)
    scaling = published.scaled and {
        **published.scaled,
        **({"original_max_position_embeddings": original} if original else {}),
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(published.kind, **{**_SIZES, **values, "rope_scaling": scaling})
    return AutoModelForCausalLM.from_config(config).eval()


def shorter(spec: str, divisor: int) -> str:
    """The scheme with its fields in tokens divided."""
    parts = []
    for part in spec.split("+"):
        name, _, fields = part.partition(":")
        pairs = [field.split("=") for field in fields.split(",") if field]
        divided = [f"{key}={int(value) // divisor if key in IN_TOKENS else value}" for key, value in pairs]
        parts.append(":".join(filter(None, [name, ",".join(divided)])))
    return "+".join(parts)


def planned(name: str, spec: str) -> dict[str, Scheme]:
    """The parts of the scheme by name, with what the checkpoint fills in."""
    (stack,) = read_stacks(build(name))
    return {part.name: part for part in plan_mounts(get_scheme(spec), stack).scheme.parts()}


def test_every_checkpoint_has_a_plan():
    assert [path.stem for path in PLANS] == sorted(CHECKPOINTS)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_measures_at_the_length_that_it_is_for(path, capsys):
    assert main(["measure", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out.count(f"--output runs/families/{path.stem}/") == 2
    trained, times = CHECKPOINTS[path.stem].trained, CHECKPOINTS[path.stem].times
    runs = yaml.safe_load(path.read_text())["runs"]
    assert runs["ordinary-text"]["lengths"][0] == trained
    assert {run["lengths"][-1] for run in runs.values()} == {times * trained}


@pytest.mark.parametrize(("name", "spec"), LINES)
def test_values_follow_from_the_length(name, spec):
    published, parts = CHECKPOINTS[name], planned(name, spec)
    trained, target = published.trained, published.times * published.trained
    # a factor counts from the length before the checkpoint's own scaling
    original = published.values.get("original_max_position_embeddings") or (
        trained / (published.scaled["factor"] if published.scaled else 1)
    )
    expected = {
        "rerope": {"window": trained // 2},
        "logn": {"training_length": trained},
        "self_extend": {
            "window": trained // 2,
            "group_size": math.ceil((target - trained / 2) / (trained - trained / 2)),
        },
        "dca": {"chunk_size": 3 * trained // 4, "local_window": trained // 8},
        "yarn": {"factor": target / original},
        "pi": {"factor": target / original},
        "lm_infinite": {"local_window": trained},
    }
    for part in parts.values():
        for field, value in expected[part.name].items():
            assert getattr(part, field) == value, field


@pytest.mark.parametrize(("name", "spec"), LINES)
def test_a_line_is_patched_without_a_warning_and_taken_back_to_the_bit(name, spec):
    model = build(name)
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RopePatchWarning)
        patch(model, spec)
    ids = tokens(64)
    # what lies within the window is as it was; other frequencies differ from the first distance on
    assert torch.isfinite(logits(model, ids)).all()
    left = next((line for line in describe(model).splitlines() if line.startswith("left alone")), "")
    assert left.count(",") + bool(left) == CHECKPOINTS[name].left_alone
    unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize(("name", "spec"), LINES)
def test_beyond_its_length_a_line_equals_the_oracle_and_generates_what_it_computes(name, spec):
    divisor = CHECKPOINTS[name].trained // SHORT
    ids, line = tokens(2 * SHORT), shorter(spec, divisor)
    model = build(name, divisor)
    plain = logits(model, ids)
    patch(model, line)
    found = logits(model, ids)
    assert (found - plain).abs().max() > 1e-2
    assert torch.equal(generated(model, ids), greedy(model, ids))
    unpatch(model)
    with patch(model, line, attention="oracle"):
        assert_close(found, logits(model, ids))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_page_has_the_values_of_a_plan(path):
    name, page = path.stem, (FOLDER.parents[2] / "docs" / "how-to" / "falls-apart.md").read_text()
    rerope, extended, dca, yarn = (spec for one, spec in LINES if one == name and not spec.startswith(("pi", "lm")))
    fields = {
        part: scheme.fields() for spec in (rerope, extended, dca, yarn) for part, scheme in planned(name, spec).items()
    }
    group, chunk = fields["self_extend"], fields["dca"]
    cells = [
        *(CHECKPOINTS[name].trained * times for times in (1, CHECKPOINTS[name].times)),
        fields["rerope"]["window"],
        f"{group['group_size']}, {group['window']:,}",
        f"{chunk['chunk_size']:,}, {chunk['local_window']:,}",
        f"{fields['yarn']['factor']:g}",
    ]
    (row,) = [line for line in page.splitlines() if line.startswith(f"| [{name}]")]
    assert row.endswith(f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else cell for cell in cells)} |")
