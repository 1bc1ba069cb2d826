"""Explanations of how attention is scored: which executor scores each layer of a patched model, in how many pieces, and
why the others do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import nn

from rope_patch.attention.engine import rows_for
from rope_patch.attention.problem import AttentionMode, Problem
from rope_patch.attention.table import explained
from rope_patch.description import Description, Rows
from rope_patch.errors import InvalidField, NotPatched, UnsupportedModel, counted
from rope_patch.models.arguments import NAMES_OF_CACHE
from rope_patch.mounting.layer_state import LayerState
from rope_patch.patching import PatchHandle, find_handles, loaded


@dataclasses.dataclass(frozen=True)
class Account:
    """A record of how one layer was computed in one situation.

    Attributes:
        taken: the name of the executor, or of the model's own attention.
        kernel: what scores a piece, which may be another executor, and why faster ones do not; empty if there is no
            choice.
        rotation: how states were rotated on a GPU; empty if the executor takes them as they arrive.
        pieces: the number of pieces that the executor scored; 0 if it repeats the plan of another layer, or does not
            belong to this library.
        others: the name of every other executor, and the reason why it was not taken.
        refusal: the reason why no executor computes the layer; empty if one does.
    """

    taken: str
    pieces: int = 0
    kernel: str = ""
    rotation: str = ""
    others: tuple[tuple[str, str], ...] = ()
    refusal: str = ""

    @property
    def how(self) -> str:
        """The executor with its number of pieces, or a sentence on what happened instead."""
        if self.refusal:
            return f"refused: {self.refusal}"
        if self.pieces:
            return f"{self.taken}: {counted(self.pieces, 'piece')}"
        if self.taken in get_args(AttentionMode):
            return f"{self.taken}: repeats the plan of an earlier layer"
        return f"{self.taken}: the attention that the model had before the patch"


Accounts = dict[int, Account]


def explain(model: nn.Module | PatchHandle, input_ids: torch.Tensor, **inputs: Any) -> Description:
    """Explain layer by layer, for a prefill, a decoded token, a training step and a compiled call, which executor
    scores the layer, in how many pieces, and why each other executor was not taken.

    `explain` runs the model on `input_ids` three times: without gradients, then on one more token after the cache, then
    with gradients. The executor of a compiled model is looked up in the same table, without compiling the model.

    Args:
        model: a patched model, or its handle.
        input_ids: token ids, `(batch, length)`; the table depends on the length, the batch and the mask.
        **inputs: other arguments of the model's forward, such as `attention_mask`, or `decoder_input_ids` for an
            encoder-decoder.

    Returns:
        the table as text; `Description.tables` has a list of rows for each situation.

    Raises:
        NotPatched: the model carries no scheme.
        InvalidField: `input_ids` is no tensor.

    Example:
        >>> print(rope_patch.explain(model, input_ids))
    """
    model = loaded(model)
    if not isinstance(input_ids, torch.Tensor):
        line = "write explain(model, tokenizer(TEXT, return_tensors='pt').input_ids)"
        raise InvalidField(f"input_ids must be a tensor (batch, length), not a {type(input_ids).__name__}; {line}")
    handles = find_handles(model)
    if not handles:
        raise NotPatched(f"{type(model).__name__} carries no scheme, so its own attention scores every layer")
    training, states = model.training, [state for handle in handles for state in handle.layer_states]
    model.eval()
    found: dict[str, Accounts] = {}
    with_cache, without = ({"use_cache": keeps} if _keeps_cache(model) else {} for keeps in (True, False))
    try:
        with _watching(states) as (eager, compiled), torch.no_grad():
            output = model(input_ids, **with_cache, **inputs)
        found |= {"prefill": eager, "prefill, compiled": compiled}
        if cache := _cache_of(output):
            with _watching(states) as (eager, compiled), torch.no_grad():
                model(**_next_token(model, input_ids, output, inputs), **cache, **with_cache)
            found |= {"decoded token": eager, "decoded token, compiled": compiled}
        with _watching(states) as (eager, _), torch.enable_grad():
            model(input_ids, **without, **inputs)
        found |= {"training step": eager}
    finally:
        model.train(training)
    return Description.from_tables([_rows(situation, handles, accounts) for situation, accounts in found.items()])


@contextmanager
def _watching(states: list[LayerState]) -> Iterator[tuple[Accounts, Accounts]]:
    """Collect how each layer is computed, and how a compiled model would compute it."""
    eager: Accounts = {}
    compiled: Accounts = {}
    by_kind: dict[Any, Account] = {}

    def watch(state: LayerState, taken: str, problem: Problem | None) -> None:
        index = state.layer.index
        if problem is not None:
            eager[index] = _account(problem)
            by_kind[id(state.forwards), state.kind] = _account(dataclasses.replace(problem, compiling=True))
        else:
            eager[index] = Account(taken)
        # a layer that repeats a plan is scored as the layer that made it, and a compiled model has no plans
        compiled[index] = by_kind.get((id(state.forwards), state.kind), eager[index])

    for state in states:
        state.watch = partial(watch, state)
    try:
        yield eager, compiled
    finally:
        for state in states:
            state.watch = None


def _account(problem: Problem) -> Account:
    try:
        asked = explained(rows_for(problem), problem)
        taken = next(executor for executor, reason in asked if not reason)
        pieces, kernel = taken.pieces(problem), taken.kernel(problem)  # which may ask the table again
    except UnsupportedModel as error:
        return Account("", refusal=str(error))
    others = tuple((executor.name, reason) for executor, reason in asked if reason)
    return Account(taken.name, pieces, kernel, problem.rotation, others)


def _keeps_cache(model: nn.Module) -> bool:
    return hasattr(cast(Any, model).config, "use_cache")


def _cache_of(output: Any) -> dict[str, Any]:
    """The cache in the output of a forward, under its name; nothing if there is none."""
    named = output if isinstance(output, Mapping) else {}
    return next(({name: named[name]} for name in NAMES_OF_CACHE if named.get(name) is not None), {})


def _next_token(model: nn.Module, input_ids: torch.Tensor, output: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Build the inputs of one more token, beside the cache; the choice of the token does not matter."""
    token = input_ids[:, -1:]
    mask, others = inputs.get("attention_mask"), {key: value for key, value in inputs.items() if "decoder" not in key}
    if getattr(cast(Any, model).config, "is_encoder_decoder", False):
        encoded = (output.encoder_last_hidden_state,)
        return {**others, "decoder_input_ids": token, "encoder_outputs": encoded}
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        others["attention_mask"] = torch.cat([mask, mask[:, -1:]], dim=1)
    if "position_ids" in others:
        others["position_ids"] = others["position_ids"][..., -1:] + 1
    return {**others, "input_ids": token}


def _rows(situation: str, handles: tuple[PatchHandle, ...], accounts: Accounts) -> Rows:
    rows: list[tuple[str, str]] = [(situation, "")]
    together: dict[Account, list[int]] = {}
    for index, account in sorted(accounts.items()):
        together.setdefault(account, []).append(index)
    for account, indices in together.items():
        rows.append((_listed(indices), account.how))
        if account.kernel:
            rows.append(("  kernel", account.kernel))
        if account.rotation:
            rows.append(("  rotation", account.rotation))
        rows += [(f"  not {name}", reason) for name, reason in account.others]
    for handle in handles:
        for stack, plan in handle.mounted:
            own = [layer.index for layer in plan.touched(stack) if layer.index not in accounts]
            if own:
                rows.append((_listed(own), f"{stack.config._attn_implementation}: the model's own attention"))
            rows += [(_listed([index]), f"left alone: {reason}") for index, reason in plan.left_alone.items()]
    return rows


def _listed(indices: list[int]) -> str:
    """List layers by number, with runs as `0-3`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    spelled = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"layer{'s' * (len(indices) > 1)} {', '.join(spelled)}"
