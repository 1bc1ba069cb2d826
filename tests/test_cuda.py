"""On a GPU: every scheme under `attention="auto"` gives what its dense definition gives, in every dtype.

Texts are long enough for the engine to leave small dense blocks behind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rope_patch import get_scheme, patch
from rope_patch.attention import cudnn_kernels
from rope_patch.attention.executors import merged, reference
from rope_patch.attention.problem import Problem
from rope_patch.attention.turner import Branch
from rope_patch.training.chunked_loss import chunked_loss
from tests.cases import ALL
from tests.families import build
from tests.models import t5_families
from tests.precision import TOLERANCES, assert_near, in_one
from tests.runs import cached_logits, gradients, left_padded, logits, positions_of, tokens

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("trained_parameters"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
LENGTH = 640

dtypes = pytest.mark.parametrize("dtype", TOLERANCES)
TRIED = [spec for spec in ALL if "floater" not in spec or importlib.util.find_spec("torchdiffeq")]
schemes = pytest.mark.parametrize("scheme", TRIED)


def both(
    scheme: str,
    dtype: str,
    way: Callable[[nn.Module], torch.Tensor],
    family: str = "llama",
    make: Callable[[str], nn.Module] = build,
    slack: float = 1.0,
) -> None:
    """Compare what a way to run a model gives under the fast paths and under the definition."""
    if "xpos" in scheme and dtype == "float16":
        pytest.skip("the small scale of the test case is beyond the range of float16, in the definition too")

    def patched(attention: str) -> nn.Module:
        model = make(family).to(DEVICE, getattr(torch, dtype))
        patch(model, scheme, attention=attention)
        return model

    found, defined = (way(patched(attention)) for attention in ("auto", "oracle"))
    assert_near(found, defined, slack * TOLERANCES[dtype], lambda: way(patched("oracle").double()))


def text(length: int = LENGTH, rows: int = 1) -> torch.Tensor:
    return tokens(length, rows).to(DEVICE)


@schemes
@dtypes
@pytest.mark.parametrize("family", ["llama", "llama_mha", "baichuan", "baichuan_alibi"])
def test_forward(scheme, dtype, family):
    both(scheme, dtype, lambda model: logits(model, text(rows=2)), family)


@schemes
@dtypes
def test_gradients(scheme, dtype):
    both(scheme, dtype, lambda model: in_one(gradients(model, text())))


@dtypes
@pytest.mark.parametrize("scheme", t5_families.SPECS)
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_t5(scheme, dtype, family):
    ids, mask = (x.to(DEVICE) for x in left_padded([tokens(LENGTH), tokens(LENGTH - 37, seed=1)]))

    def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(input_ids=ids, attention_mask=mask, labels=text(rows=2))
        outputs.loss.backward()
        slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return outputs.logits.detach().flatten(), in_one(slopes)

    # scores are not scaled in T5: those of random weights are large, and so is their rounding. Where it takes the input
    # of a ReLU across zero, as it once did on an H100, gradients jump
    both(scheme, dtype, lambda model: run(model)[0], family, t5_families.build, slack=4.0)
    both(
        scheme,
        dtype,
        lambda model: run(model)[1],
        family,
        t5_families.build,
        slack=100.0 if dtype == "float32" else 4.0,
    )


@schemes
@dtypes
def test_padded(scheme, dtype):
    ids, mask = (x.to(DEVICE) for x in left_padded([tokens(LENGTH), tokens(LENGTH - 37, seed=1)]))

    def without_pads(model: nn.Module) -> torch.Tensor:
        return logits(model, ids, attention_mask=mask, position_ids=positions_of(mask))[mask.bool()]

    both(scheme, dtype, without_pads)


@pytest.mark.parametrize(
    "scheme", [spec for spec in TRIED if not get_scheme(spec).regions_by_length]
)  # others refuse texts of several lengths in a row
@dtypes
def test_packed(scheme, dtype):
    lengths = (LENGTH // 2, LENGTH // 8, LENGTH - LENGTH // 2 - LENGTH // 8)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(DEVICE)
    both(scheme, dtype, lambda model: logits(model, text(), position_ids=positions))


@dtypes
@pytest.mark.parametrize("scheme", ["yarn:factor=4", "rerope:window=128"])
def test_the_loss_in_chunks_is_that_of_all_logits(scheme, dtype):
    model = build("llama").to(DEVICE, getattr(torch, dtype))
    patch(model, scheme)
    ids = text(rows=2)
    expected = model(ids, labels=ids, use_cache=False).loss
    expected.backward()
    slopes = in_one({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    with chunked_loss(model):
        found = model(ids, labels=ids).loss
    found.backward()
    assert_near(found.detach(), expected.detach(), TOLERANCES[dtype])
    ours = in_one({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_near(ours, slopes, 2 * TOLERANCES[dtype])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["yarn:target=auto", "rerope:window=8"])
def test_fine_tuning(scheme, precision, tmp_path):
    import json

    pytest.importorskip("datasets")  # the recipe reads its text with it

    from tests.evaluation.conftest import byte_tokenizer, documents, tiny_llama
    from tests.recipes import run_recipe

    tiny_llama().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(documents(2000)[0]["text"])
    words = ["--model", tmp_path / "model", "--scheme", scheme, "--length", 64, "--targets", 8, "--steps", 30]
    words += ["--text", tmp_path / "text.txt", "--eval-text", tmp_path / "text.txt", "--batch-size", 4]
    words += ["--learning-rate", 1e-2, "--precision", precision, "--output", tmp_path / "out"]
    assert run_recipe("finetune", words) == 0
    points = [json.loads(line) for line in (tmp_path / "out" / "finetune.jsonl").read_text().splitlines()]
    before, after = (point["nll"] for point in points if (point["line"], point["length"]) == (scheme, 64))
    assert after < before


@schemes
@dtypes
def test_cached(scheme, dtype):
    sizes = (LENGTH - 24, 20, 1, 1, 1, 1)
    both(scheme, dtype, lambda model: cached_logits(model, text(), sizes))


@pytest.mark.parametrize(("length", "q_length"), [(1000, 1000), (960, 960), (1000, 500)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("least", [0, None])
def test_chunks_in_runs(length, q_length, rows, least, monkeypatch):
    """Chunks of 192 tokens by cuDNN, and by flash where they are too small for it."""
    drawn = torch.Generator().manual_seed(0)

    def states(heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.randn(rows, size, heads, 128, generator=drawn).to(DEVICE, torch.bfloat16).to(dtype)
        return made.transpose(1, 2).requires_grad_()

    positions, results = torch.arange(length, device=DEVICE)[None], []
    regions = get_scheme("dca:chunk_size=256,local_window=64").segments()
    chosen = merged.kernel_for(*(states(heads, 1, torch.bfloat16) for heads in (8, 2)), masked=False)
    kernel = chosen.eager if least == 0 else chosen
    assert kernel.batches(states(8, 1, torch.bfloat16))
    monkeypatch.setattr(merged, "kernel_for", lambda *_: kernel)
    for attend, dtype in ((merged.attend, torch.bfloat16), (reference.attend, torch.float32)):
        drawn.manual_seed(0)
        value, grad = states(2, length, dtype), states(8, q_length, dtype).detach()
        branches = tuple(Branch(some, states(8, q_length, dtype), states(2, length, dtype)) for some in regions)
        start = length - q_length
        problem = Problem(branches, value, positions[:, start:], positions, None, True, start, 128**-0.5)
        leaves = [value, *(x for branch in branches for x in (branch.query, branch.key))]
        out = attend(problem)[0]
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for one, other in zip(*results, strict=True):
        assert (one.float() - other).norm() / other.norm() < 0.02


def test_stairs_of_chunks_are_one_call():
    """A reason is none to fail: squares take their place."""
    reason = cudnn_kernels.objection_to_stairs(torch.device(DEVICE, 0), torch.bfloat16, 128)
    if reason:
        pytest.skip(reason)
