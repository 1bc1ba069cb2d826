"""`explain` says what is run, and a forced executor is run, or refused with the reason that it gives."""

import dataclasses
import json
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

import rope_patch
from rope_patch import InvalidField, NotPatched, UnsupportedModel, explain, patch
from rope_patch.attention import decay, engine, paths
from rope_patch.attention.executors import graph
from rope_patch.attention.problem import Problem
from rope_patch.attention.table import choose
from rope_patch.cli import main
from rope_patch.patching import find_handles
from tests.executors import executors_of
from tests.families import build
from tests.models.t5_families import build as build_t5

LENGTH = 560  # beyond one dense block


def ids(batch=1, length=LENGTH):
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(0))


def situations(description):
    return {rows[0][0]: rows[1:] for rows in description.tables}


def taken(rows):
    """The executor of each group of layers."""
    return [value.partition(":")[0] for name, value in rows if name.startswith("layer")]


EXPECTED = {
    # prefill, compiled, decoded token, compiled, training step; products are a matter of the processor
    "rerope:window=16": ({"merged", "products"}, {"graph"}, {"joined"}, {"traced"}, {"merged"}),
    "self_extend:group_size=4,window=16": ({"merged", "products"}, {"graph"}, {"joined"}, {"traced"}, {"merged"}),
    "alibi": ({"merged"}, {"graph"}, {"masked"}, {"traced"}, {"merged"}),
    "xpos": ({"merged", "products"}, {"graph"}, {"joined"}, {"graph"}, {"merged"}),
    "rope+shaw": ({"chunked"},) * 5,
    "logn": ({"sdpa"},) * 5,
    "yarn:factor=4": ({"sdpa"},) * 5,
}
NAMES = ("prefill", "prefill, compiled", "decoded token", "decoded token, compiled", "training step")


@pytest.mark.parametrize("spec", EXPECTED)
def test_every_situation_names_its_executor(spec):
    model = build("llama")
    patch(model, spec)
    found = situations(explain(model, ids()))
    assert tuple(found) == NAMES
    for name, expected in zip(NAMES, EXPECTED[spec], strict=True):
        assert set(taken(found[name])) <= expected, (name, found[name])


@pytest.mark.parametrize("spec", ["rerope:window=16", "alibi", "rope+shaw", "xpos"])
def test_it_names_what_runs(spec, monkeypatch):
    run = []
    rows = {}
    for row in {*engine.ROWS, *paths.ROWS}:

        def attend(problem, row=row):
            run.append(row.executor.name)
            return row.executor.attend(problem)

        rows[row] = dataclasses.replace(row, executor=mock.Mock(wraps=row.executor))
        rows[row].executor.configure_mock(name=row.executor.name, attend=attend)
    monkeypatch.setattr(engine, "ROWS", tuple(rows[row] for row in engine.ROWS))
    model = build("llama")
    patch(model, spec)
    with torch.no_grad():
        model(ids())
    monkeypatch.undo()
    (said,) = set(taken(situations(explain(model, ids()))["prefill"]))
    assert set(run) == {said}


def test_every_other_executor_has_a_reason_and_there_is_one_line_for_each():
    model = build("llama")
    patch(model, "rerope:window=16")
    for rows in situations(explain(model, ids(2), attention_mask=torch.ones(2, LENGTH).long())).values():
        reasons = {
            name.strip().removeprefix("not "): reason for name, reason in rows if name.strip().startswith("not ")
        }
        names = {row.executor.name for row in engine.ROWS}
        assert reasons.keys() | set(taken(rows)) == names
        assert all(reason.strip() for reason in reasons.values())


def test_the_model_is_left_as_it_was():
    model = build("llama").train()
    patch(model, "rerope:window=16")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explain(model, ids())
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(state.watch is None for state in rope_patch.patching.find_handle(model).layer_states)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_that_are_left_alone_and_layers_of_their_own():
    model = build("gemma3")
    patch(model, "layers:[full_attention=rerope:window=8+logn;rest=none]")
    said = str(explain(model, ids(length=40)))
    assert "left alone: selected as none" in said
    assert "layers 1, 3" in said


def test_padded_rows_and_an_encoder_with_a_decoder():
    model = build("llama")
    patch(model, "rerope:window=16")
    mask = torch.ones(3, LENGTH).long()
    mask[1, :70] = 0
    assert "merged" in explain(model, ids(3), attention_mask=mask) or "products" in explain(
        model, ids(3), attention_mask=mask
    )
    whole = build_t5("t5")
    patch(whole, "t5+logn")
    said = explain(whole, ids(length=20), decoder_input_ids=ids(length=9))
    assert {rows[0][0] for rows in said.tables} >= {"prefill", "decoded token"}


def test_an_unpatched_model_has_nothing_to_explain():
    with pytest.raises(NotPatched, match="carries no scheme"):
        explain(build("llama"), ids())


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.float32, "flash on the CPU"),
        (torch.float64, "plain products; not flash on the CPU: it does not take torch.float64"),
    ],
)
def test_it_names_the_kernel_of_a_piece(dtype, kernel):
    model = build("llama").to(dtype)
    patch(model, "rerope:window=16", attention="merged")
    found = situations(explain(model, ids()))
    assert {dict(found[name])["  kernel"] for name in ("prefill", "training step")} == {kernel}


def test_it_names_the_kernel_of_a_token_in_half_precision():
    model = build("llama").bfloat16()
    patch(model, "rerope:window=16")
    rows = dict(situations(explain(model, ids()))["decoded token"])
    assert (rows["layer 0"], rows["  kernel"]) == ("joined: 2 pieces", "flash on the CPU")


@pytest.mark.parametrize(
    ("spec", "attention", "length"),
    [
        ("rerope:window=16", "auto", LENGTH),
        ("rerope:window=16", "graph", LENGTH),
        ("rerope:window=16", "chunked", LENGTH),
        ("alibi", "auto", LENGTH),
        ("xpos", "auto", LENGTH),
        ("xpos:scale_base=8", "auto", 3 * decay.ROWS),
        ("xpos:scale_base=8", "decayed", 3 * decay.ROWS),
    ],
)
def test_it_names_what_runs_inside_the_operator(spec, attention, length, monkeypatch):
    run, model = [], build("llama")
    patch(model, spec, attention="auto" if attention in ("graph", "decayed") else attention)
    rows = situations(explain(model, ids(length=length)))["prefill, compiled"]
    rope_patch.unpatch(model)
    patch(model, spec, attention=attention)
    chosen = graph._inside
    monkeypatch.setattr(graph, "_inside", lambda problem: run.append(chosen(problem)) or run[-1])
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend="eager")(ids(length=length), use_cache=False)
    assert taken(rows) == ["graph"]
    assert {dict(rows)["  kernel"].partition(" inside the operator")[0]} == {executor.name for executor in run}


def test_it_says_how_states_are_rotated(monkeypatch):
    model = build("llama")
    patch(model, "rerope:window=16", attention="merged")
    for rows in situations(explain(model, ids())).values():
        assert "  rotation" not in dict(rows)  # on a CPU there is one way
    monkeypatch.setattr(Problem, "rotation", "one kernel for all regions")
    assert dict(situations(explain(model, ids()))["prefill"])["  rotation"] == "one kernel for all regions"


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(
    ("built", "spec", "inputs"),
    [(build, "rerope:window=16", {}), (build_t5, "t5:interpolation=2", {"decoder_input_ids": ids(length=4)})],
    ids=["llama", "t5"],
)
def test_it_gives_a_cache_by_the_name_that_the_model_has(built, spec, inputs):
    patch(model := built(), spec)
    assert "decoded token" in situations(explain(model, ids(length=90), **inputs))


# --- forcing one ---


_EVERY = ("rerope:window=16", "dca:chunk_size=24,local_window=8", "alibi")

FORCED = {"merged": _EVERY, "flex": _EVERY, "reference": _EVERY, "chunked": _EVERY}
"""Executors by name, and the schemes that they compute."""


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, specs in FORCED.items() for spec in specs])
def test_a_forced_executor_is_run_and_equals_the_definition(name, spec):
    model, expected = build("llama"), build("llama")
    patch(model, spec, attention=name)
    patch(expected, spec, attention="oracle")
    texts = ids(2, 90)
    mask = torch.ones_like(texts)
    mask[1, :20] = 0
    with torch.no_grad():
        for given in ({"attention_mask": mask}, {}):
            theirs, ours = (each(texts, **given).logits for each in (expected, model))
            torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], atol=2e-4, rtol=2e-4)
        token = texts[:, -1:]
        steps = [each(token, past_key_values=each(texts, use_cache=True).past_key_values) for each in (expected, model)]
        torch.testing.assert_close(steps[1].logits, steps[0].logits, atol=2e-4, rtol=2e-4)
    with executors_of(model) as run, torch.no_grad():  # FlexAttention has no training step on a CPU to explain
        model(texts)
    assert set(run) == {name}


@pytest.mark.parametrize(
    ("spec", "name", "reason"),
    [
        ("rope+shaw", "merged", "term by content"),
        ("rerope:window=16", "joined", "do not follow keys of a cache"),
        ("rerope:window=16", "block", "have no bias"),
        ("rerope:window=16", "graph", "not compiled"),
        ("alibi", "products", "have a bias"),
        ("rerope:window=16", "intervals", "for GPUs"),
        ("rerope:window=16", "one_call", "not on a GPU"),
        ("rerope:window=16", "traced", "not compiled"),
    ],
)
def test_an_executor_that_does_not_apply_is_refused_with_its_reason(spec, name, reason):
    model = build("llama")
    patch(model, spec, attention=name)
    refusal = rf"attention='{name}' cannot compute this call: {name}: .*{reason}"
    with torch.no_grad(), pytest.raises(UnsupportedModel, match=refusal):
        model(ids())


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_of_a_decay_can_be_forced(compiled):
    given = ids(1, 2 * decay.ROWS + 40)
    logits = []
    for attention in ("reference", "decayed"):
        model = build("llama")
        patch(model, "xpos:scale_base=8", attention=attention)
        torch._dynamo.reset()
        call = torch.compile(model, backend="eager") if compiled and attention == "decayed" else model
        with executors_of(model) as run, torch.no_grad():
            logits.append(call(given, use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=2e-4)
    assert compiled or set(run) == {"decayed"}
    with torch.no_grad(), pytest.raises(UnsupportedModel, match="decayed: the queries are one block"):
        model(ids(1, 40))


@pytest.mark.parametrize("word", ["joined", "segmented"])
def test_words_for_pieces_side_by_side_also_take_a_compiled_token(word):
    model = build("llama")
    patch(model, "rerope:window=16", attention=word)
    told = []
    states = [state for handle in find_handles(model) for state in handle.layer_states]
    for state in states:
        state.watch = lambda name, problem: told.append(problem)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids(length=40)[:, :1], past_key_values=cache)
    problem = dataclasses.replace(told[0], compiling=True)
    assert choose(engine.rows_for(problem), problem).name == "traced"


def test_the_environment_forces_one_where_nothing_is_said(monkeypatch):
    monkeypatch.setenv("ROPE_PATCH_ATTENTION", "reference")
    model, other = build("llama"), build("llama")
    patch(model, "rerope:window=16")
    patch(other, "rerope:window=16", attention="chunked")
    assert set(taken(situations(explain(model, ids()))["prefill"])) == {"reference"}
    assert set(taken(situations(explain(other, ids()))["prefill"])) == {"chunked"}
    monkeypatch.setenv("ROPE_PATCH_ATTENTION", "fastest")
    with pytest.raises(InvalidField, match=r"ROPE_PATCH_ATTENTION='fastest'.*merged"):
        patch(build("llama"), "rerope:window=16")


@pytest.mark.parametrize("word", ["auto", "oracle", "chunked", "segmented", "fused"])
def test_the_published_words_fall_back_as_before(word):
    model = build("llama")
    patch(model, "rope+shaw", attention=word)
    with torch.no_grad():
        model(ids(length=40), use_cache=True)


def test_describe_prints_it(capsys):
    assert main(["describe", "--scheme", "rerope:window=16", "--attention", "600"]) == 0
    assert "not fused" in capsys.readouterr().out
    assert main(["describe", "--scheme", "rerope:window=16", "--attention", "600", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["attention"]) == 5
    assert main(["describe", "--attention", "0", "--scheme", "dca"]) == 2


def test_a_call_that_no_executor_computes_is_told_as_refused(monkeypatch):
    def refuse(rows, problem):
        raise UnsupportedModel("merged: gradients are wanted")

    monkeypatch.setattr("rope_patch.explaining.explained", refuse)
    model = build("llama")
    patch(model, "rerope:window=16")
    rows = situations(explain(model, ids()))["training step"]
    assert [value for name, value in rows if name.startswith("layer")] == ["refused: merged: gradients are wanted"]
