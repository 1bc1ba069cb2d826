"""The fused kernel against the oracle in float64, with gradients: on a GPU, or where there is none under Triton's
interpreter, in a process of its own, because it has to be chosen before Triton is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import rope_patch
from rope_patch import RopePatchWarning, get_scheme, patch
from rope_patch.attention import rotation_kernel
from rope_patch.attention.executors import fused, reference
from rope_patch.attention.executors.fused import Blocks
from rope_patch.attention.problem import Problem
from rope_patch.attention.terms import DistanceBias
from rope_patch.attention.trials import Trial
from rope_patch.attention.turner import Branch, Fused
from rope_patch.schemes.slots import ALL_PAIRS
from tests.attention.problems import whole
from tests.attention.test_segmented import ROWS, inputs_of
from tests.families import build
from tests.runs import cached_logits, left_padded, positions_of, tokens

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason='Triton is not installed: pip install ".[triton]"'
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TOLERANCES = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""Largest error relative to the norm."""

OF_A_SHIFT = "gradient of a number that is added to all sums"
"""It is zero, since only differences count; relative to the gradients whose sum it is."""


@dataclass(frozen=True)
class Case:
    """One call. `rows` are the groups of the keys of each row; `bias` is a spec, "table" for a learned number for each
    distance, "slopes" for a learned one for each head, "far" for heads that hide near keys, or "sums" for running
    sums; `split` asks for more programs than there are blocks of queries.
    """

    spec: str = ""
    length: int = 37
    kv_length: int = 37
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    causal: bool = True
    rows: tuple[tuple[int, ...], ...] | None = None
    bias: str | None = None
    sinks: bool = False
    softcap: float | None = None
    window: float = float("inf")
    in_order: bool = True
    start_in_memory: bool = False
    interleaved: bool = False
    split: bool = False


def pads(*groups: tuple[int, int]) -> tuple[int, ...]:
    """A row of groups, each with its length; -1 for pads."""
    return tuple(group for group, length in groups for _ in range(length))


PADDED = (pads((0, 37)), pads((-1, 5), (0, 32)), pads((0, 24), (-1, 13)))
PACKED = (pads((0, 11), (1, 19), (2, 7)),)

USUAL = {
    "rerope": Case("rerope:window=6", sinks=True),
    "dca, table, padded": Case("dca:chunk_size=12,local_window=3", bias="table", rows=PADDED[2:]),
    "lm_infinite, alibi, softcap": Case("lm_infinite:local_window=7,n_global=4", bias="alibi", softcap=2.0),
    "self_extend, both directions": Case("self_extend:group_size=4,window=7", causal=False, head_dim=24, value_dim=8),
    "window, sums, packed": Case("", window=9, bias="sums", rows=PACKED, interleaved=True),
    "heads that hide near keys": Case(bias="far", rows=PADDED[1:2]),
    "decoding, split, padded": Case(
        "rerope:window=20", length=1, kv_length=130, split=True, rows=(pads((-1, 40), (0, 90)),), start_in_memory=True
    ),
    # the window of a block of queries begins with the last key of a block; sinks leave a gradient to queries' sums
    "window, sums, sinks, after a cache": Case(window=7, length=24, kv_length=29, heads=1, bias="sums", sinks=True),
    "decoding, split in three, sinks": Case(length=1, kv_length=100, heads=1, split=True, sinks=True),
    "both directions, table": Case(length=20, kv_length=20, heads=1, causal=False, bias="table"),
    "learned slopes": Case(length=9, kv_length=9, bias="slopes"),
    # in half precision the output is rounded, and with it the gradients of all scores of a query
    "sums, float16": Case(bias="sums", dtype="float16", heads=4, kv_heads=2),
    "sums, sinks, bfloat16": Case(bias="sums", dtype="bfloat16", sinks=True),
}

SPECS = {
    "plain": "",
    "rerope": "rerope:window=6",
    "leaky_rerope": "leaky_rerope:window=17,factor=4",
    "self_extend": "self_extend:group_size=4,window=16",
    "dca": "dca:chunk_size=12,local_window=3",
    "chunks of 16": "dca:chunk_size=20,local_window=4",
    "lm_infinite": "lm_infinite:local_window=7,n_global=4",
    "window": "window:window=7",
}

WAYS = {
    "float16": Case(dtype="float16", heads=4, kv_heads=2),
    "bfloat16": Case(dtype="bfloat16"),
    "one head, odd lengths": Case(length=31, kv_length=53, heads=1),
    "three heads for a key, wide": Case(heads=3, head_dim=80, value_dim=64),
    "narrow values, interleaved": Case(head_dim=24, value_dim=40, interleaved=True),
    "padded, alibi, sinks": Case(rows=PADDED, bias="alibi", sinks=True),
    "packed, table": Case(rows=PACKED, bias="table"),
    "sums, softcap": Case(bias="sums", softcap=1.5, heads=3),
    "window": Case(window=10),
    "not in order": Case(in_order=False, bias="alibi"),
    "after a cache, split": Case(length=5, kv_length=90, split=True, sinks=True, bias="sums"),
    "decoding": Case(length=1, kv_length=90, split=True, bias="table"),
    "decoding, split, hidden keys": Case("", length=1, kv_length=130, split=True, bias="far", heads=21, kv_heads=7),
    "decoding, softcap": Case(length=1, kv_length=64, start_in_memory=True, softcap=3.0, bias="alibi"),
}

BOTH_DIRECTIONS = {
    f"{spec}, {way}": dataclasses.replace(case, spec=SPECS[spec], causal=False)
    for spec in ("plain", "rerope", "self_extend", "leaky_rerope", "window")
    for way, case in {
        "table": Case(bias="table", heads=3),
        "padded": Case(rows=PADDED, bias="table"),
        "packed, sinks": Case(rows=PACKED, sinks=True, dtype="float16"),
        "alibi": Case(bias="alibi", softcap=2.0),
    }.items()
}


def errors_of(case: Case) -> dict[str, float]:
    """Of the output and of every gradient, relative to the norm."""
    random, double = torch.Generator().manual_seed(0), torch.float64
    batch, dtype = 1 if case.rows is None else len(case.rows), getattr(torch, case.dtype)

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=double).to(DEVICE, dtype).requires_grad_()

    start = case.kv_length - case.length
    leaves = {
        "queries": leaf(batch, case.length, case.heads, case.head_dim),
        "keys": leaf(batch, case.kv_heads, case.kv_length, case.head_dim),
        "values": leaf(batch, case.kv_heads, case.kv_length, case.value_dim),
    }
    if case.sinks:
        leaves["sinks"] = leaf(case.heads)
    if case.bias == "table":
        leaves["bias"] = leaf(case.heads, 2 * case.kv_length + 1, dtype=torch.float32)
    if case.bias == "slopes":
        leaves["bias"] = leaf(case.heads, dtype=torch.float32)
    if case.bias == "sums":
        leaves["sums"] = leaf(batch, case.heads, case.kv_length, dtype=double)
    scheme = get_scheme(case.spec) if case.spec else None
    regions = scheme.segments() if scheme else (ALL_PAIRS,)
    groups = None if case.rows is None else torch.tensor(case.rows, device=DEVICE)
    positions = torch.arange(case.kv_length, device=DEVICE)[None]
    if groups is not None:
        begins = torch.nn.functional.pad(groups.diff() > 0, (1, 0)) * positions
        positions = positions - begins.cummax(dim=-1).values
    if not case.in_order:
        positions = positions + 3 * (positions > 20)
    # neither is a rotation: what is undone is the transpose
    partner = torch.arange(case.head_dim, device=DEVICE)
    partner = partner ^ 1 if case.interleaved else partner.roll(case.head_dim // 2)
    rates = torch.randn(2, case.head_dim, generator=random).to(DEVICE)

    def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None, :, None] * rates[0]
        return angles.cos(), angles.sin() * rates[1]

    of_queries = [tables(region.query_map(positions[:, start:])) for region in regions]
    of_keys = [tables(region.key_map(positions)) if i == 0 else None for i, region in enumerate(regions)]

    def bias(leaves: dict[str, torch.Tensor]) -> DistanceBias | None:
        if case.bias == "alibi":
            alibi = get_scheme("alibi", symmetric=not case.causal)
            return DistanceBias(lambda distance: alibi.bias(distance, case.heads), linear=True)
        if case.bias == "far":
            least = 7 * torch.arange(case.heads, device=DEVICE)
            return DistanceBias(
                lambda distance: torch.where(
                    distance.to(DEVICE) >= least.view(-1, *[1] * distance.ndim), -0.1 * distance, -torch.inf
                )
            )
        if case.bias == "slopes":
            return DistanceBias(
                lambda distance: leaves["bias"].view(-1, *[1] * distance.ndim) * distance.to(DEVICE), linear=True
            )
        if case.bias != "table":
            return None
        return DistanceBias(lambda distance: leaves["bias"][:, distance.to(DEVICE) + case.kv_length])

    def inputs(leaves: dict[str, torch.Tensor]) -> Problem:
        return Problem(
            branches=(),
            value=leaves["values"],
            query_positions=positions[:, start:],
            key_positions=positions,
            mask=None,
            groups=groups,
            causal=case.causal and case.length > 1,
            query_start=torch.tensor(start, device=DEVICE) if case.start_in_memory else start,
            scaling=0.3,
            bias=bias(leaves),
            running_bias=leaves.get("sums"),
            sinks=leaves.get("sinks"),
            softcap=case.softcap,
        )

    def turned(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        return x if table is None else x * table[0] + x[..., partner] * table[1]

    def definition(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        queries, call = leaves["queries"].transpose(1, 2), inputs(leaves)
        branches = tuple(
            Branch(region, turned(queries, of_query), turned(leaves["keys"], of_key))
            for region, of_query, of_key in zip(regions, of_queries, of_keys, strict=True)
        )
        if case.window < float("inf"):
            slots = torch.arange(case.kv_length, device=DEVICE)
            near = slots[start:, None] - slots < case.window
            seen = call.visible()
            call = dataclasses.replace(call, mask=near if seen is None else seen & near, groups=None)
        return reference.attend(call.replaced(branches=branches))[0]

    def kernel(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        queries, keys = leaves["queries"].transpose(1, 2), leaves["keys"]
        how = {"in_order": case.in_order, "window": case.window}
        call = Fused(queries, keys, regions, tuple(of_queries), tuple(of_keys), partner, **how)
        with pytest.MonkeyPatch.context() as change:
            change.setattr(fused, "PROGRAMS", 1000 if case.split else 1)
            return fused.launched(inputs(leaves), call, (Blocks(16, 16, 4, 1),) * 3)

    grad = torch.randn(batch, case.heads, case.length, case.value_dim, generator=random, dtype=double).to(DEVICE)
    found = {}
    for attend, of in ((kernel, lambda x: x.dtype), (definition, lambda x: double)):
        mine = {name: leaf.detach().to(of(leaf)).requires_grad_() for name, leaf in leaves.items()}
        out = attend(mine)
        slopes = torch.autograd.grad(out, list(mine.values()), grad.to(out.dtype))
        found[attend] = {"output": out.detach(), **dict(zip(mine, slopes, strict=True))}
    result = {}
    for name, expected in found[definition].items():
        assert found[kernel][name].dtype == (dtype if name == "output" else leaves[name].dtype)
        result[name] = float((found[kernel][name].double() - expected).norm() / expected.norm().clamp(min=1e-12))
    if "sums" in leaves:
        of_sums = found[kernel]["sums"]
        result[OF_A_SHIFT] = float((of_sums.sum(dim=-1).abs() / of_sums.abs().sum(dim=-1)).max())
    return result


def begin_interpreter() -> None:
    """Let the interpreter multiply bfloat16, which it keeps as integers: without this it multiplies those."""
    torch.set_num_threads(1)
    from triton import language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *others):
        a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


@pytest.fixture(scope="module")
def run():
    """Call a function where the kernels are: here on a GPU, else in a process under the interpreter."""
    if DEVICE == "cuda":
        yield lambda function, *arguments: function(*arguments)
        return
    with pytest.MonkeyPatch.context() as change:
        change.setenv("TRITON_INTERPRET", "1")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, initializer=begin_interpreter) as pool:
            yield lambda function, *arguments: pool.submit(function, *arguments).result()


def check(run, case: Case) -> None:
    errors = run(errors_of, case)
    assert errors.pop(OF_A_SHIFT, 0.0) < TOLERANCES["float32"]
    assert max(errors.values()) < TOLERANCES[case.dtype], errors


@needs_triton
@pytest.mark.parametrize("name", USUAL)
def test_output_and_gradients_are_those_of_the_oracle(run, name):
    check(run, USUAL[name])


def decoded(start_in_memory: bool) -> tuple[float, float]:
    """The error of a step without gradients relative to the norm, and the share of rotated keys that were computed."""
    made, random, window, length = [], torch.Generator().manual_seed(0), 70, 300
    query, key, value = (torch.randn(1, 2, n, 16, generator=random).to(DEVICE) for n in (1, length, length))
    cos, sin = torch.randn(2, length, 16, generator=random).to(DEVICE)
    positions, partner = torch.arange(length, device=DEVICE)[None], torch.arange(16, device=DEVICE).roll(8)
    start = torch.tensor(length - 1, device=DEVICE) if start_in_memory else length - 1
    inputs = Problem((), value, positions[:, -1:], positions, None, False, start, 0.3)
    near, far = regions = tuple(region for region in get_scheme("rerope", window=window).segments() if region.stop > 0)
    branches = Branch(near, query, key * cos + key[..., partner] * sin), Branch(far, query, key)
    expected = reference.attend(inputs.replaced(branches=branches))[0]

    def unwritten(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.full_like(x, torch.nan))
        return made[-1]

    with pytest.MonkeyPatch.context() as change, torch.no_grad():
        change.setattr(torch, "empty_like", unwritten)
        out = fused.launched(inputs, Fused(query, key, regions, (None, None), ((cos, sin), None), partner))
    (rotated,) = (x for x in made if x.shape == key.shape)
    return float((out - expected).norm() / expected.norm()), float(rotated.isfinite().float().mean())


@needs_triton
@pytest.mark.parametrize("start_in_memory", [False, True])
def test_a_decoding_step_rotates_only_the_keys_that_it_scores_rotated(run, start_in_memory):
    error, share = run(decoded, start_in_memory)
    assert error < TOLERANCES["float32"]
    assert 70 / 300 <= share <= (70 + 2 * rotation_kernel.TOKENS) / 300


def differentiated_twice() -> str:
    query, key = torch.randn(2, 1, 1, 16, 16, requires_grad=True)
    positions = torch.arange(16)[None]
    inputs = Problem((), key, positions, positions, None, True, 0, 0.3)
    out = fused.launched(inputs, Fused(query, key, (ALL_PAIRS,), (None,), (None,)))
    try:
        torch.autograd.grad(out.sum(), query, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""


@needs_triton
def test_a_second_derivative_is_refused_by_name(run):
    assert "the fused kernel has no second derivatives" in run(differentiated_twice)


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", SPECS)
def test_every_scheme_in_every_way(run, spec, way):
    check(run, dataclasses.replace(WAYS[way], spec=SPECS[spec]))


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize("name", BOTH_DIRECTIONS)
def test_both_directions(run, name):
    check(run, BOTH_DIRECTIONS[name])


def of_models(spec: str) -> tuple[int, list[float]]:
    """How often a model of one layer calls the kernel, and its errors relative to the norm: of logits of padded rows,
    of gradients, and of logits of two steps after a cache.
    """
    calls, found = [], []
    fused.objection(torch.device(DEVICE), torch.float32, 16, 16)
    with pytest.MonkeyPatch.context() as change:
        change.setitem(vars(fused.EXECUTOR), "attend", lambda call: calls.append(call) or fused.attend(call))
        for attention in ("fused", "oracle"):
            model = build("llama", num_hidden_layers=1).to(DEVICE)
            patch(model, spec, attention=attention)
            ids, mask = (x.to(DEVICE) for x in left_padded([tokens(30), tokens(23)]))
            logits = model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits
            leaf = model.model.layers[0].self_attn.q_proj.weight
            (gradient,) = torch.autograd.grad(logits[mask.bool()].square().sum(), leaf)
            with torch.no_grad():
                steps = cached_logits(model, ids, [28, 1, 1], mask)
            found.append((logits[mask.bool()], gradient, steps[mask.bool()]))
    return len(calls), [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]


@needs_triton
@pytest.mark.parametrize(
    "spec",
    ["yarn:factor=4+rerope:window=6+logn", pytest.param("dca:chunk_size=9,local_window=2", marks=pytest.mark.nightly)],
)
def test_a_model_under_it_is_the_model_under_the_oracle(run, spec):
    calls, errors = run(of_models, spec)
    assert calls == 1 + 3
    assert max(errors) < TOLERANCES["float32"], errors


attend = fused.launched


def trusted() -> bool:
    fused.objection.forget()
    with torch.inference_mode():
        return not fused.objection(torch.device(DEVICE), torch.float32, 16, 16)


@needs_triton
def test_kernels_that_are_right_are_trusted(run):
    assert run(trusted)


@needs_triton
@pytest.mark.parametrize("wrong", [None, 1, 40])
def test_kernels_that_are_wrong_for_one_query_or_for_several_are_not_trusted(wrong, monkeypatch):
    def attend(inputs, call):
        def turned(x, table):
            return x if table is None else x * table[0] + x[..., call.partner] * table[1]

        tables = zip(call.regions, call.query_tables, call.key_tables, strict=True)
        branches = tuple(Branch(region, turned(call.queries, q), turned(call.keys, k)) for region, q, k in tables)
        return reference.attend(inputs.replaced(branches=branches))[0] * (1.1 if inputs.q_length == wrong else 1)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fused, "launched", attend)
    trial = Trial("The kernel", fused.objection.compare, fused.objection.tolerance)
    if wrong is None:
        assert trial(torch.device("cpu"), torch.float32, 16, 16) == ""
        return
    told = rf"The kernel is not used \(cpu, torch.float32, 16, 16\): its output of {wrong} queries differed"
    with pytest.warns(RopePatchWarning, match=told):
        assert "differed from the definition by 0." in trial(torch.device("cpu"), torch.float32, 16, 16)


UNSUPPORTED = {
    "dropout": ({"dropout": 0.1}, {}),
    "a mask of several queries": ({"mask": torch.ones(3, 1, 45, 45, dtype=torch.bool)}, {}),
    "more keys than queries in both directions": ({"causal": False, "query_positions": torch.arange(9)[None]}, {}),
    "a table of a bias where distance is no difference of slots": ({"bias": "table"}, {"in_order": False}),
    "learned slopes where distance is no difference of slots": ({"bias": "slopes"}, {"in_order": False}),
    "learned frequencies": ({}, {"query_tables": "learned"}),
    "learned frequencies of keys": ({}, {"key_tables": "learned"}),
    "two dtypes": ({}, {"keys": torch.float16}),
    "float64": ({"value": torch.float64}, {"queries": torch.float64, "keys": torch.float64}),
    "wide heads": ({}, {"queries": 272, "keys": 272}),
}


@pytest.mark.parametrize("what", [None, *UNSUPPORTED])
def test_what_the_kernels_do_not_support_is_left_to_others(what, monkeypatch):
    monkeypatch.setattr(fused, "objection", lambda *_: "")
    inputs, _ = inputs_of("", ROWS, 45, 45, torch.float32)
    (branch,), learned = inputs.branches, torch.ones(16, requires_grad=True)
    biases = {
        "table": DistanceBias(lambda distance: distance.sqrt()[None]),
        "slopes": DistanceBias(lambda distance: learned[:4, None] * distance, linear=True),
    }
    of_inputs, of_call = UNSUPPORTED.get(what, ({}, {}))
    states = {"queries": branch.query, "keys": branch.key, "value": inputs.value}
    tables = {"query_tables": ((learned.detach(),) * 2,), "key_tables": (None,)}

    def changed(name, value):
        if name in states:
            return states[name].to(value) if isinstance(value, torch.dtype) else states[name].repeat(1, 1, 1, 17)
        return biases[value] if name == "bias" else ((learned, learned),) if value == "learned" else value

    inputs = dataclasses.replace(inputs, **{name: changed(name, value) for name, value in of_inputs.items()})
    call = Fused(states["queries"], states["keys"], (ALL_PAIRS,), **tables)
    call = dataclasses.replace(call, **{name: changed(name, value) for name, value in of_call.items()})
    assert (not fused.unsupported(inputs, call)) == (what is None)


def test_without_triton_nothing_applies(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    inputs, _ = inputs_of("", ROWS, 45, 45, torch.float32)
    (branch,) = inputs.branches
    call = whole(inputs, branch.query, branch.key, "fused")
    assert fused.supports(call) == "Triton is not installed, or does not compile for this device"


def test_nothing_imports_triton_before_it_is_needed():
    for path in Path(rope_patch.__file__).parent.rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        found = any("triton" in name or "attention.triton_kernels" in name for name in names)
        assert not found or path.match("attention/triton_kernels.py"), path
