"""Attention as one operator for compiled graphs: inside the operator values are known, and the eager paths apply.

The spans are an operator of their own: a compiler computes equal calls once, so layers that share a mask share them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import library
from torch.utils._pytree import tree_flatten, tree_unflatten

from rope_patch.attention import paths
from rope_patch.attention.bias import DiagonalTerm, KeyTerm, TileBias, has_terms, tile_bias
from rope_patch.attention.decay import Decay
from rope_patch.attention.executors import decayed, merged
from rope_patch.attention.problem import AttentionMode, Output, Problem
from rope_patch.attention.spans import MOST_SPANS_PER_ROW, Span, find_spans
from rope_patch.attention.table import Executor, Needs, choose
from rope_patch.attention.terms import upcast
from rope_patch.attention.tile_kernels import Merged
from rope_patch.attention.turner import Branch
from rope_patch.errors import UnsupportedPositions
from rope_patch.schemes.slots import ALL_PAIRS, Region
from rope_patch.schemes.tools.positions import Identity
from rope_patch.schemes.tools.rotary import RotaryLayout


class _Arguments(NamedTuple):
    """The arguments of the operator: a rotated `Problem` in the types that operators can have.

    Attributes:
        states: query and key of each branch; their slots are those of the values.
        start: slot of the first query, a scalar.
        source: of the `TileBias`.
        rate: of the decay, whose layout pairs the dimensions `pairs`, all first ones before all second ones.
        spans: the result of `_spans`.
        regions: start, stop, chunk and `keys_below` of each branch. Their maps are not needed: states are rotated.
        gradient: whether a gradient will be needed.
        learns: whether `source` needs one.
    """

    states: list[torch.Tensor]
    value: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor
    start: torch.Tensor
    mask: torch.Tensor | None
    groups: torch.Tensor | None
    source: torch.Tensor | None
    rate: torch.Tensor | None
    spans: torch.Tensor
    regions: list[float]
    pairs: list[int]
    scaling: float
    causal: bool
    scattered: bool
    mode: AttentionMode
    gradient: bool
    learns: bool

    @property
    def bias(self) -> TileBias | None:
        """Rebuild the bias by distance or by running sums from its `source`; None without one."""
        if self.source is None:
            return None
        if self.source.ndim == 3:
            return KeyTerm(self.source)
        return DiagonalTerm(self.source, 0 if self.causal else 1 - self.value.shape[2])

    def problem(self) -> Problem:
        """Rebuild the eager call, with its decay, and with the spans if they are known."""
        numbers = [self.regions[i : i + 4] for i in range(0, len(self.regions), 4)]
        regions = [
            Region(Identity(), Identity(), start, stop, int(chunk), below) for start, stop, chunk, below in numbers
        ]
        pairs = zip(regions, self.states[::2], self.states[1::2], strict=True)
        self._check_distances()
        bias, running_bias = (None, None) if self.bias is None else self.bias.as_inputs()
        return Problem(
            branches=tuple(Branch(None if region == ALL_PAIRS else region, q, k) for region, q, k in pairs),
            value=self.value,
            query_positions=self.positions,
            key_positions=self.key_positions,
            mask=self.mask,
            causal=self.causal,
            query_start=int(self.start),
            scaling=self.scaling,
            bias=bias,
            running_bias=running_bias,
            groups=self.groups,
            scattered=self.scattered,
            mode=self.mode,
            decay=self.decay,
            find_spans=None if self.decay is not None else lambda _: _decoded(self.spans, self.causal),
            compiling=False,
        )

    @property
    def decay(self) -> Decay | None:
        """The decay of scores, under which each block of queries has spans of its own."""
        if self.rate is None:
            return None
        half = len(self.pairs) // 2
        return Decay(RotaryLayout(tuple(self.pairs[:half]), tuple(self.pairs[half:])), self.rate)

    def _check_distances(self) -> None:
        """Refuse distances beyond the table of a bias, which counts slots, because a graph has one size.

        Raises:
            UnsupportedPositions: positions skip, and a bias that is no multiple of the distance counts them.
        """
        if not isinstance(self.bias, DiagonalTerm):
            return
        first = self.key_positions.flatten(1).amin(dim=-1)
        farthest = int((self.positions.amax(dim=-1) - first).amax())
        if farthest >= (known := self.value.shape[2]):
            raise UnsupportedPositions(
                f"positions skip: a distance is {farthest}, but a compiled model reads a bias for distances below the "
                f"{known} slots of its keys; call the model without torch.compile"
            )

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """The tensors that may receive gradients."""
        return [self.value, *self.states, *([self.source] if self.learns and self.source is not None else [])]


def _objection(problem: Problem) -> str:
    """The reason why the operator cannot compute products of a compiled model, or an empty string. It has no position
    maps of regions, by which a decay counts, and no gradient flows into a mask.
    """
    if not has_terms(problem):
        return "running sums stand beside a bias that is not linear, or tokens see later keys"
    if problem.mask is not None and problem.mask.requires_grad:
        return "the mask needs a gradient"
    call = problem.rotated
    if call.decay is not None and any(branch.region is not None for branch in call.branches):
        return "scores decay by the positions of a region, and there are many queries"
    return ""


supports = Needs(compiling=True, fits_kernels=True, further=_objection)


def attend(problem: Problem) -> Output:
    """Compute the output `(batch, heads, q_len, value_dim)` while compiling. Inside the operator the table chooses
    again.
    """
    call = problem.rotated.as_causal
    decay, bias, start, mask = call.decay, _term(call), call.query_start, call.mask
    if not isinstance(start, torch.Tensor):
        start = torch.full((), start)
    learns = torch.is_grad_enabled() and bias is not None and bias.source.requires_grad
    arguments = _Arguments(
        states=[state for branch in call.branches for state in (branch.query, branch.key)],
        value=call.value,
        positions=call.query_positions,
        key_positions=call.key_positions,
        start=start,
        mask=mask,
        groups=call.groups,
        source=None if bias is None else bias.source,
        rate=None if decay is None else decay.rate,
        spans=_spans(call.query_positions, mask, call.groups, start, call.value.shape[0], call.causal),
        regions=[bound for branch in call.branches for bound in _bounds(branch.region or ALL_PAIRS)],
        pairs=[] if decay is None else [*decay.layout.first, *decay.layout.second],
        scaling=call.scaling,
        causal=call.causal,
        scattered=call.scattered,
        mode=_mode(problem),
        gradient=torch.is_grad_enabled(),
        learns=learns,
    )
    gradient = arguments.gradient and any(tensor.requires_grad for tensor in arguments.differentiable)
    return _attend(*arguments._replace(gradient=gradient))[0].transpose(1, 2), None


def _mode(problem: Problem) -> AttentionMode:
    """The word for the choice inside the operator."""
    return "auto" if problem.mode == "graph" else problem.mode


def _within(problem: Problem) -> Problem:
    """The call as the operator computes it, with values that are known."""
    return problem.rotated.as_causal.replaced(compiling=False, mode=_mode(problem))


def _pieces(problem: Problem) -> int:
    call = _within(problem)
    return _inside(call).pieces(call)


def _kernel(problem: Problem) -> str:
    """The name of the executor that runs inside the operator, and what scores its pieces."""
    call = _within(problem)
    inside = _inside(call)
    return ": ".join(filter(None, [f"{inside.name} inside the operator", inside.kernel(call)]))


EXECUTOR = Executor(
    "graph", "one operator of a compiled model, which chooses inside", supports, attend, _pieces, _kernel
)


def _term(problem: Problem) -> TileBias | None:
    """Like `tile_bias`, but a multiple of the distance counts positions: a graph does not know whether they skip."""
    bias = problem.bias
    if bias is None or not (bias.linear and problem.causal):
        return tile_bias(problem)
    none, one = bias.values(0, 2).double().unbind(dim=-1)
    positions = problem.key_positions if problem.by_head else problem.key_positions[:, None]
    slopes = (one - none).view(1, positions.shape[1] if problem.by_head else 1, -1, 1)
    linear = (slopes * positions[:, :, None]).flatten(1, 2)
    return KeyTerm(linear if problem.running_bias is None else problem.running_bias + linear)


def _bounds(region: Region) -> tuple[float, ...]:
    return float(region.start), float(region.stop), float(region.chunk), float(region.keys_below)


_SCHEMA = """(Tensor[] states, Tensor value, Tensor positions, Tensor key_positions, Tensor start, Tensor? mask,
Tensor? groups, Tensor? source, Tensor? rate, Tensor spans, float[] regions, int[] pairs, float scaling, bool causal,
bool scattered, str mode, bool gradient, bool learns"""


def _scores(problem: Problem) -> torch.Tensor:
    """Compute the output of a problem by the executor that the table chooses in eager mode."""
    return _inside(problem).attend(problem)[0]


def _inside(problem: Problem) -> Executor:
    return decayed.EXECUTOR if problem.decay is not None else choose(paths.ROWS, problem)


def _by_pieces(problem: Problem) -> bool:
    """Whether `merged` scores the call, so that its log-sum-exp is kept for the gradients. Under a decay each block has
    its own.
    """
    return problem.decay is None and not paths.MERGED.reason(problem)


@library.custom_op("rope_patch::attend", mutates_args=(), schema=f"{_SCHEMA}) -> (Tensor, Tensor)")
def _attend(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `(batch, q_len, heads, value_dim)` and its log-sum-exp, which is zeros that nobody reads unless
    gradients are computed by pieces.
    """
    arguments = _Arguments(*args)
    problem = arguments.problem()
    if arguments.gradient and _by_pieces(problem):
        out, lse = merged.forward(problem, problem.spans or (), arguments.bias)
    else:
        out, lse = _scores(problem), _shaped(*args)[1].zero_()
    return out.transpose(1, 2).contiguous(), lse


@_attend.register_fake
def _shaped(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = _Arguments(*args)
    query, value = arguments.states[0], arguments.value
    batch, heads, length = query.shape[:3]
    return value.new_empty(batch, length, heads, value.shape[-1]), upcast(query.new_empty(0)).new_empty(query.shape[:3])


@library.custom_op(
    "rope_patch::attend_backward",
    mutates_args=(),
    schema=f"{_SCHEMA}, Tensor out, Tensor lse, Tensor grad) -> Tensor[]",
)
def _attend_backward(*args: Any) -> list[torch.Tensor]:
    """The gradients of `_Arguments.differentiable`."""
    *given, out, lse, grad = args
    arguments, grad = _Arguments(*given), grad.transpose(1, 2)
    problem, bias = arguments.problem(), arguments.bias
    if _by_pieces(problem):
        of_bias = torch.zeros_like(bias.source) if bias is not None and arguments.learns else None
        result = Merged(out.transpose(1, 2), lse, grad)
        found = merged.backward(problem, problem.spans or (), bias, result, of_bias)
        like = [problem.value, *arguments.states]
        gradients = [torch.zeros_like(x) if own is None else own for x, own in zip(like, found, strict=True)]
        return gradients if of_bias is None else [*gradients, of_bias]
    return _differentiated(arguments, grad)


@_attend_backward.register_fake
def _like_differentiable(*args: Any) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in _Arguments(*args[:-3]).differentiable]


def _differentiated(arguments: _Arguments, grad: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a call without pieces: the output is computed again and differentiated."""
    fresh = [tensor.detach().requires_grad_() for tensor in arguments.differentiable]
    count = len(arguments.states)
    value, states, source = fresh[0], fresh[1 : 1 + count], fresh[1 + count :]
    arguments = arguments._replace(value=value, states=states, source=source[0] if source else arguments.source)
    # inside of an operator, autograd is excluded
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        out = _scores(arguments.problem())
        gradients = torch.autograd.grad(out, fresh, grad, allow_unused=True, materialize_grads=True)
    return [torch.empty_like(x).copy_(gradient) for x, gradient in zip(fresh, gradients, strict=True)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    leaves, ctx.tree = tree_flatten((*inputs, *output))
    ctx.save_for_backward(*(leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves))
    ctx.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    leaves = [other if kept is None else kept for kept, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
    given = tree_unflatten(leaves, ctx.tree)
    of_value, *others = _attend_backward(*given, grad)
    fields = given[: len(_Arguments._fields)]
    gradients: list[Any] = [[] if isinstance(field, list) and not field else None for field in fields]
    count = len(given[0])
    gradients[:2] = others[:count], of_value
    if others[count:]:
        gradients[_Arguments._fields.index("source")] = others[count]
    return tuple(gradients)


_attend.register_autograd(_backward, setup_context=_keep)

_COLUMNS = 10  # numbers of a span in the result of `_spans`


@library.custom_op(
    "rope_patch::spans",
    mutates_args=(),
    schema="(Tensor positions, Tensor? mask, Tensor? groups, Tensor start, int rows, bool causal) -> Tensor",
)
def _spans(positions: Any, mask: Any, groups: Any, start: Any, rows: int, causal: bool) -> torch.Tensor:
    """Encode the result of `find_spans` as a table `(1 + most, 10)`: the number of spans, or -1 for None, then a row
    for each.
    """
    table = _no_spans(positions, mask, groups, start, rows, causal)
    spans = find_spans(positions, mask, groups, int(start), rows, causal)
    if spans is None or len(spans) >= len(table):
        table[0, 0] = -1
        return table
    table[0, 0] = len(spans)
    for number, span in enumerate(spans, start=1):
        bounds = (bound for part in (span.rows, span.queries, span.keys) for bound in (part.start, part.stop))
        window = -1 if span.window == math.inf else int(span.window)
        table[number] = torch.tensor([*bounds, span.first_position, window, span.hidden, span.before])
    return table


@_spans.register_fake
def _no_spans(positions: Any, mask: Any, groups: Any, start: Any, rows: int, causal: bool) -> torch.Tensor:
    return torch.zeros(1 + rows * (MOST_SPANS_PER_ROW + 1), _COLUMNS, dtype=torch.int64)


def _decoded(table: torch.Tensor, causal: bool) -> tuple[Span, ...] | None:
    """Decode the table of `_spans` into what `find_spans` returns."""
    count = int(table[0, 0])
    if count < 0:
        return None
    spans = []
    for row in table[1 : 1 + count].tolist():
        rows, queries, keys = (slice(*row[i : i + 2]) for i in (0, 2, 4))
        first_position, window, hidden, before = row[6:]
        spans.append(
            Span(rows, queries, keys, first_position, math.inf if window < 0 else window, causal, hidden, before)
        )
    return tuple(spans)
