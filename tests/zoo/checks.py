"""What is checked of each model type: each check returns the largest difference from the truth.

Differences are in units of the standard deviation of the expected outputs. A check that the plain model fails itself
(some read no pads, some keep no cache) is not asked of the patched one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch import NotExpressible, PatchHandle, UnsupportedModel, export_rope_parameters, native_scheme, patch
from tests.zoo import truth
from tests.zoo.builder import SHORT, Specimen, outputs, run, text

WINDOW = 6
REROPE = f"rerope:window={WINDOW}"
TOLERANCE = 1e-3
"""Of float32: Dia and mT5, whose scores have no scale, amplify its rounding to half of this."""
_EFFECT = 5e-3


class Blind(Exception):
    """A check would pass under any scheme, because outputs do not depend on it."""


class PlainFails(Exception):
    """The plain model does not do what would be compared."""


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, in standard deviations of what was expected; infinite where something is not finite."""
    assert found.shape == expected.shape
    if not found.isfinite().all():
        return float("inf")
    return float((found - expected).double().abs().max() / expected.double().std())


def native(specimen: Specimen) -> float:
    """The checkpoint's own scheme, scored late."""
    return _under(specimen, native_scheme(specimen.model), mount="late")


def beyond(specimen: Specimen) -> float:
    """A window wider than the text."""
    _refuse_bias(specimen)
    return _under(specimen, "rerope:window=1000")


def rerope(specimen: Specimen) -> float:
    """A narrow window, against `truth.rerope`."""
    _refuse_bias(specimen)
    return _against(specimen, REROPE, lambda model, handle: truth.rerope(touched(model, handle), WINDOW))


def alibi(specimen: Specimen) -> float:
    """A penalty on distance, against `truth.alibi`."""

    def defined(model: PreTrainedModel, handle: PatchHandle) -> Any:
        if handle.stack.rotary:
            return truth.alibi(touched(model, handle))
        for module in touched(model, handle):  # of T5, which asks its first layer for the biases of all
            module.compute_bias = lambda queries, keys, m=module, **_: -truth.penalty(m.n_heads, keys).float()[None]
        return nullcontext()

    return _against(specimen, "alibi", defined)


def static(specimen: Specimen, scheme: str) -> float:
    """Static frequencies: the rotary mount against the late one, and against plain Transformers with their config."""
    model, late = specimen.fresh(), specimen.fresh()
    with patch(model, scheme) as handle:
        found = run(model, text())
        _see(found, run(specimen.fresh(), text()))
    truths = []
    with suppress(UnsupportedModel), patch(late, scheme, mount="late"):  # not where tables alone can be replaced
        truths.append(run(late, text()))
    if (exported := _exported(specimen, handle)) is not None:
        truths.append(run(exported, text()))
    if not truths:
        raise PlainFails("Transformers cannot express it")
    return max(difference(truth, found) for truth in truths)


def _exported(specimen: Specimen, handle: PatchHandle) -> PreTrainedModel | None:
    """Plain Transformers with the `rope_parameters` of a scheme that only replaces tables; None for other schemes."""
    if handle.plan.late or not handle.plan.rotary:  # also where a norm undoes a temperature in the tables
        return None
    config = copy.deepcopy(specimen.model.config)
    part = next(part for part in (config, *_parts(config)) if type(part) is type(handle.stack.config))
    try:
        part.rope_parameters = export_rope_parameters(handle.scheme, part)
    except NotExpressible:
        return None
    return specimen.again(config)


def cache(specimen: Specimen, scheme: str) -> float:
    """A prompt in two pieces, or in one where states cannot go on with a piece, and then a token at a time, against one
    forward.
    """

    def pairs(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(_cached(model, prompt), run(model, text()))]

    try:
        return _as_plain(specimen, scheme, partial(pairs, prompt=(13, 15)))
    except PlainFails:
        return _as_plain(specimen, scheme, partial(pairs, prompt=(28,)))


def pads(specimen: Specimen, scheme: str) -> float:
    """Three rows with left pads, against each row alone."""

    def pairs(model: PreTrainedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = [text(length=length, seed=length) for length in (28, 19, 11)]
        ids = torch.cat([nn.functional.pad(row, (28 - row.shape[1], 0)) for row in rows])
        found = run(model, ids, attention_mask=(ids != 0).long())
        return [(found[i : i + 1, -row.shape[1] :], run(model, row)) for i, row in enumerate(rows)]

    return _as_plain(specimen, scheme, pairs)


def unpatch(specimen: Specimen, scheme: str) -> float:
    """Tensors, attributes, hooks, configs and outputs before and after, bit for bit."""
    model, kept = specimen.fresh(), []
    for mounted in (True, False):
        tensors = [*model.state_dict().items(), *model.named_buffers(), ("outputs", run(copy.deepcopy(model), text()))]
        parts = [(list(vars(part)), len(part._forward_pre_hooks)) for part in model.modules()]
        kept.append((model.config.to_dict(), parts, [(name, tensor.numpy().tobytes()) for name, tensor in tensors]))
        if mounted:
            with patch(model, scheme):
                run(model, text())
    return 0.0 if kept[0] == kept[1] else float("inf")


def fits(specimen: Specimen, scheme: str) -> float:
    """Whether a scheme is accepted, for a model that reads more than text."""
    with patch(specimen.fresh(), scheme):
        return 0.0


def table(specimen: Specimen) -> float:
    """A table of positions under hierarchical positions: as before within its length, finite beyond."""
    model, short = specimen.fresh(), text(length=SHORT)
    expected = run(model, short)
    with patch(model, "hierarchical") as handle:
        if handle.plan.embedding != "rows":
            raise PlainFails("it has no table of positions")
        return difference(run(model, short), expected) if run(model, text()).isfinite().all() else float("inf")


SPECS = {"rerope": REROPE, "alibi": "alibi", "pi": "pi:factor=4", "yarn": "yarn:factor=4"}
CHECKS: dict[str, Callable[[Specimen], float]] = {
    **{check.__name__: check for check in (native, beyond, rerope, alibi)},
    **{name: partial(static, scheme=SPECS[name]) for name in ("pi", "yarn")},
    **{
        f"{check.__name__} {name}": partial(check, scheme=SPECS[name])
        for check in (cache, pads, unpatch)
        for name in ("rerope", "alibi", "yarn")
    },
}
"""What a type is checked for, by the scheme where there are several."""


def _under(specimen: Specimen, scheme: Any, **options: Any) -> float:
    """A scheme that changes nothing."""
    model = specimen.fresh()
    expected = run(model, text())
    with patch(model, scheme, **options):
        return difference(run(model, text()), expected)


def _against(specimen: Specimen, scheme: str, defined: Callable[[PreTrainedModel, PatchHandle], Any]) -> float:
    """A scheme against a model that a context defines."""
    model, ids = specimen.fresh(), text()
    with patch(model, scheme) as handle:
        found = run(model, ids)
    plain = specimen.again(specimen.model.config, "eager")
    _see(found, run(plain, ids))
    if (own := difference(run(specimen.fresh(), ids), run(plain, ids))) > TOLERANCE:
        raise PlainFails(f"its own eager attention differs from its other by {own:.1e}")
    with defined(plain, handle):
        return difference(found, run(plain, ids))


def touched(model: PreTrainedModel, handle: PatchHandle) -> list[nn.Module]:
    """The attention modules of another model that correspond to those that a scheme changed."""
    names = {module: name for name, module in handle.model.named_modules()}
    return [model.get_submodule(names[layer.module]) for stack, plan in handle.mounted for layer in plan.touched(stack)]


def _refuse_bias(specimen: Specimen) -> None:
    with patch(specimen.fresh(), REROPE) as handle:
        if not handle.stack.rotary:
            raise PlainFails("its own positions are a bias, which a rotation replaces")


def _see(found: torch.Tensor, plain: torch.Tensor) -> None:
    if (effect := difference(found, plain)) < _EFFECT:
        raise Blind(f"the scheme changes outputs by {effect:.0e} alone")


def _as_plain(
    specimen: Specimen,
    scheme: str,
    pairs: Callable[[PreTrainedModel], list[tuple[torch.Tensor, torch.Tensor]]],
) -> float:
    """The largest difference of pairs under a scheme, where the plain model has none."""

    def largest(model: PreTrainedModel) -> float:
        return max(difference(found, expected) for found, expected in pairs(model))

    with patch(model := specimen.fresh(), scheme) as handle:
        pass  # a scheme that is refused needs no comparison
    try:
        exported = _exported(specimen, handle)  # under it, an indexer may choose other keys by rounding
        own = max(largest(plain) for plain in (specimen.fresh(), exported) if plain is not None)
    except Exception as error:  # of the model itself
        raise PlainFails(str(error)) from error
    if own > TOLERANCE:
        raise PlainFails(f"the plain model differs by {own:.1e}")
    with patch(model, scheme):
        return largest(model)


def _cached(model: PreTrainedModel, prompt: tuple[int, ...]) -> torch.Tensor:
    ids, past, start, found = text(), None, 0, []
    for size in (*prompt, *[1] * (ids.shape[1] - sum(prompt))):
        states, past = outputs(model, ids[:, start : start + size], past_key_values=past, use_cache=True)
        if past is None:
            raise PlainFails("it returns no cache")
        found.append(states[:, -size:])
        start += size
    return torch.cat(found, dim=1)


def _parts(config: Any) -> Iterator[Any]:
    return (part for name in config.sub_configs if (part := getattr(config, name, None)) is not None)
