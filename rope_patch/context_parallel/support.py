"""Checks whether processes can share a row of a model, with the reason in plain English if they cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rope_patch.models.base import AttentionLayer, Stack, is_causal
from rope_patch.mounting.plan import Plan, others_take_masks
from rope_patch.schemes.base import Scheme

_KINDS = ("full_attention", "sliding_attention")


def reason_not_to_share(stack: Stack, plan: Plan) -> str:
    """The reason why processes cannot share a row of a stack under a plan, or an empty string."""
    return next(_reasons(stack, plan, (*stack.layers, *stack.others)), "")


def _reasons(stack: Stack, plan: Plan, layers: Sequence[AttentionLayer]) -> Iterator[str]:
    family = type(stack.module).__name__
    if plan.scheme.stateful:
        yield f"{plan.scheme} carries a state from token to token, which the processes would compute one after another"
    if plan.scheme.by_document:
        yield f"{plan.scheme} reads the length of each document, of which a process has a part; use mixed=false"
    if stack.absolute is not None:
        yield f"{family} reads its positions from a table at its input"
    elif len(layers) != stack.config.num_hidden_layers or others_take_masks(
        stack.module, [layer.module for layer in layers]
    ):
        yield f"{family} has layers other than attention, in which tokens meet as well"
    for layer in layers:
        if layer.unscored:
            yield f"{layer.name}: {layer.unscored}"
        if layer.kind not in _KINDS:
            yield f"{layer.name} is of kind {layer.kind}; allowed: {', '.join(_KINDS)}"
        if layer.sliding_window is not None and not is_causal(layer.module):
            yield f"{layer.name} has a window in both directions"
    if getattr(stack.config, "is_decoder", False) and getattr(stack.config, "is_encoder_decoder", False):
        yield f"{family} also reads an encoder; share the rows of model.get_encoder()"
    if stack.native is not None and stack.native.length_dependent and _reads_tables(stack, plan):
        yield f"{stack.native} of the checkpoint follows the length of the row, which each process would misread"


def _reads_tables(stack: Stack, plan: Plan) -> bool:
    """Whether some layer rotates by tables that the model computes for the positions of a forward."""
    own = {index for _, each in plan.by_layer or ((stack, plan),) if each.frequencies == "late" for index in each.late}
    return not plan.rotary and any(layer.rotates and layer.index not in own for layer in stack.layers)


def reason_not_to_divide_heads(stack: Stack, scheme: Scheme, number: int) -> str:
    """The reason why the heads of a stack cannot be divided over processes, or an empty string."""
    if scheme.methods & {"content_bias", "weight_factor", "relative_values"}:
        return f"{scheme} depends on the content of all heads; use backend='gather'"
    for layer in stack.layers:
        kv_heads = layer.heads.num // (getattr(layer.module, "num_key_value_groups", None) or 1)
        if layer.heads.num % number or (kv_heads % number and number % kv_heads):
            return (
                f"{layer.name} has {layer.heads.num} heads and {kv_heads} of keys, which {number} processes cannot "
                "divide; use backend='gather'"
            )
    return ""
