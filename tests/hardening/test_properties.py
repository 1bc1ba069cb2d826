"""Any model under any scheme or composition, however it is carried out: what the tables of cases in `tests/contract`
say of a few, random cases say of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache, StaticCache

from rope_patch import RopePatchError, get_scheme, patch
from rope_patch.attention import behind_cache
from rope_patch.attention.executors import chunked
from tests.families import build
from tests.hardening.exploring import explore
from tests.hardening.legal import is_cached_exactly, schemes
from tests.hardening.scale import parts
from tests.hardening.situations import Situation, assert_same_weights, situations, weights_of
from tests.models import absolute_families, t5_families
from tests.runs import assert_close, assert_same_gradients, cached_logits, gradients, logits, tokens

pytestmark = pytest.mark.usefixtures("trained_parameters")

CASES = "property cases"
ORACLE: dict[str, Any] = {"mount": "late", "attention": "oracle"}


def exploring(usual: int, hard: int, size: int = 100) -> pytest.MarkDecorator:
    """Parametrise a test by the cases that it goes through: `number` of them, of which `part`."""
    return pytest.mark.parametrize(("part", "number"), list(enumerate(parts(usual=usual, hard=hard, size=size))))


@pytest.fixture(autouse=True)
def _blocks(part, monkeypatch):
    """In half of the tests tiny texts take the ways that are meant for long ones."""
    if part % 2:
        monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 300)
        monkeypatch.setattr(behind_cache, "SMALL", 16)


def answered(run: Callable[[], Any]) -> Any:
    """What a run gives that has no reason to be refused any more."""
    try:
        return run()
    except RopePatchError as error:
        raise AssertionError(f"refused, while the oracle was not: {error}") from error


def run(model: nn.Module, case: Situation, **options: Any) -> torch.Tensor:
    """The logits that mean something, `(tokens, vocabulary)`; the model is as it was before."""
    with patch(model, case.scheme, **options):
        return logits(model, case.text.ids, **case.text.inputs)[case.text.shown]


def assert_means(found: torch.Tensor, case: Situation, expected: torch.Tensor) -> None:
    """As near to the oracle in float64 as the oracle in the same precision is, give or take."""
    allowed = 3e-5 * expected.abs().max().clamp(min=1)
    if (found - expected).abs().max() > allowed:
        literal = run(case.shape.build(), case, **ORACLE)
        assert_close(found.double(), expected, float(allowed + 4 * (literal - expected).abs().max()))


@exploring(usual=24, hard=900)
def test_the_fast_ways_mean_what_the_oracle_means(part, number, count):
    def holds(case):
        model = case.shape.build()
        before = weights_of(model)
        plain = logits(model, case.text.ids, **case.text.inputs)
        expected = run(case.shape.reference, case, **ORACLE)
        found = answered(lambda: run(model, case, mount=case.mount, attention=case.attention))
        assert_means(found, case, expected)
        assert_same_weights(model, before)
        assert torch.equal(logits(model, case.text.ids, **case.text.inputs)[case.text.shown], plain[case.text.shown])

    situation = situations("none", "left pads", "right pads", "packed", "any")
    count(CASES, explore(situation, holds, number, part))


@exploring(usual=6, hard=150)
def test_half_precision_loses_no_more_than_the_plain_model(part, number, count):
    def holds(case):
        half = case.shape.build(torch.bfloat16)
        expected = run(case.shape.reference, case, **ORACLE)
        found = answered(lambda: run(half, case, mount=case.mount, attention=case.attention))
        literal = run(half, case, **ORACLE)
        assert found.dtype == torch.bfloat16
        lost = (literal - expected).abs().mean() + 1e-3 * expected.abs().mean()
        assert (found - expected).abs().mean() <= 3 * lost

    count(CASES, explore(situations("none", "left pads", "packed"), holds, number, part))


@pytest.mark.parametrize("spec", ["dynamic_ntk", "dynamic_yarn"])
@pytest.mark.parametrize("part", [0])
def test_the_longest_document_of_a_packed_row_says_its_length(spec, part):
    """Found by the cases above: where attention was left to Transformers, the last document did."""
    positions = torch.cat([torch.arange(length) for length in (40, 3)])[None]
    model = build()
    with patch(model, spec, **ORACLE):
        expected = logits(model, tokens(43), position_ids=positions)
    with patch(model, spec):
        assert_close(logits(model, tokens(43), position_ids=positions), expected)


def reached(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of all parameters that the loss depends on; on a few of a scheme a short text does not."""
    return {name: gradient for name, gradient in gradients(model, ids).items() if gradient is not None}


@exploring(usual=6, hard=250)
def test_gradients_are_those_of_the_oracle(part, number, count):
    def holds(case):
        model = case.shape.build(torch.float64)
        with patch(model, case.scheme, **ORACLE):
            expected = reached(model, case.text.ids)
        with patch(model, case.scheme, mount=case.mount, attention=case.attention):
            assert_same_gradients(answered(lambda: reached(model, case.text.ids)), expected)

    count(CASES, explore(situations("none"), holds, number, part))


@st.composite
def cached(draw):
    """A situation, the sizes of the pieces in which its text is read, and the kind of cache."""
    case = draw(situations("none", "left pads"))
    length = case.text.ids.shape[1]
    cuts = sorted(draw(st.sets(st.integers(1, length), max_size=4)) - {length})
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    return case, sizes, draw(st.sampled_from(["dynamic", "dynamic", "static"])), draw(st.integers(0, 5))


@exploring(usual=12, hard=350)
def test_a_text_read_in_pieces_is_the_text(part, number, count):
    def holds(given):
        case, sizes, kind, room = given
        ids, mask = case.text.ids, case.text.inputs.get("attention_mask")
        model = case.shape.build(torch.float64)
        if not is_cached_exactly(case.scheme, ids.shape[1]):
            sizes = [ids.shape[1]]
        expected = run(case.shape.reference, case, **ORACLE)
        with patch(model, case.scheme, mount=case.mount, attention=case.attention):
            cache = DynamicCache(config=model.config)
            if kind == "static":
                cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + room)
            found = answered(lambda: cached_logits(model, ids, sizes, mask, cache))[case.text.shown]
        assert_close(found, expected, 3e-5 * float(expected.abs().max().clamp(min=1)))

    count(CASES, explore(cached(), holds, number, part))


@exploring(usual=8, hard=200)
def test_pads_are_invisible(part, number, count):
    def holds(case):
        model = case.shape.build(torch.float64)
        with patch(model, case.scheme, mount=case.mount, attention=case.attention):
            found = logits(model, case.text.ids, **case.text.inputs)
            for row, shown, alone in zip(found, case.text.shown, case.text.rows, strict=True):
                expected = logits(model, alone)[0]
                assert_close(row[shown], expected, 3e-5 * float(expected.abs().max().clamp(min=1)))

    count(CASES, explore(situations("left pads", "right pads"), holds, number, part))


# --- encoders and decoders, and models with a table of positions ---------------------------------------------------


@exploring(usual=4, hard=100)
def test_encoders_and_decoders_mean_what_the_oracle_means(part, number, count):
    cases = st.tuples(
        st.sampled_from(sorted(t5_families.FAMILIES)),
        schemes(pairs=4, heads=4),
        st.sampled_from(["auto", "segmented", "chunked"]),
        st.integers(1, 50),
        st.integers(1, 50),
        st.integers(0, 20),
    )

    def holds(case):
        family, scheme, attention, read, written, pads = case
        model = t5_families.build(family).double()
        before = weights_of(model)
        ids, target = tokens(read, rows=2), tokens(written, rows=2, seed=1)
        mask = torch.ones_like(ids)
        mask[1, : min(pads, read - 1)] = 0

        @torch.no_grad()
        def said(**options):
            with patch(model, scheme, allow_untrained=True, **options):
                return model(input_ids=ids, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits

        expected = said(**ORACLE)
        found = answered(lambda: said(attention=attention))
        assert_close(found, expected, 1e-4 * float(expected.abs().max().clamp(min=1)))
        assert_same_weights(model, before)

    count(CASES, explore(cases, holds, number, part))


@exploring(usual=8, hard=50)
def test_tables_grow_and_shrink_back(part, number, count):
    capacity = absolute_families.CAPACITY
    count_of_rows = st.integers(1, 5 * capacity)
    alpha = st.floats(0.1, 0.4)
    tables = st.one_of(
        st.builds(lambda rows: get_scheme("learned", extend=rows), count_of_rows),
        st.builds(
            lambda rows, seed: get_scheme("learned", num_positions=rows, seed=seed), count_of_rows, alpha.map(int)
        ),
        st.builds(
            lambda rows, alpha: get_scheme("hierarchical", num_positions=rows, alpha=alpha), count_of_rows, alpha
        ),
        st.builds(
            lambda rows, base: get_scheme("sinusoidal", num_positions=rows, base=base), count_of_rows, st.floats(2, 1e5)
        ),
    )
    cases = st.tuples(st.sampled_from(sorted(absolute_families.CONFIGS)), tables)

    def holds(case):
        family, scheme = case
        model = absolute_families.build(family)
        before, text = weights_of(model), absolute_families.tokens(capacity, rows=2)
        plain = absolute_families.outputs(model, text)
        with patch(model, scheme):
            rows = scheme.fields().get("num_positions") or scheme.fields()["extend"]
            longest = absolute_families.outputs(model, absolute_families.tokens(rows))
            assert longest.isfinite().all()
            if scheme.keeps_rows and rows >= capacity:
                assert_close(absolute_families.outputs(model, text), plain)
        assert_same_weights(model, before)
        assert torch.equal(absolute_families.outputs(model, text), plain)

    count(CASES, explore(cases, holds, number, part))
