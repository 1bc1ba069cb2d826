"""Choose how to score: the fastest path that is exact for the inputs."""

from __future__ import annotations

import torch

from rope_patch.attention import decode, operator, oracle, paths
from rope_patch.attention.call import Call
from rope_patch.attention.decay import attend_with_decay
from rope_patch.attention.fused import launch, support
from rope_patch.attention.inputs import AttentionInputs, AttentionMode, Branch
from rope_patch.attention.tile_kernels import FlashCUDA, kernel_for
from rope_patch.schemes.slots import ALL_PAIRS, Region


def score(
    inputs: AttentionInputs, call: Call, mode: AttentionMode = "auto"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a whole call, decoding steps included. The branches of `inputs` are filled in here.

    Returns:
        output `(batch, heads, q_len, value_dim)`, and under the mode `oracle` the weights
        `(batch, heads, q_len, kv_len)`.
    """
    decay = call.decay()
    if decay is None and (output := _by_one_kernel(inputs, call, mode)) is not None:
        return output, None
    if mode == "fused":
        mode = "auto"
    if decode.applies(inputs, call, mode, decay):
        if torch.compiler.is_compiling():
            return decode.attend_in_graph(inputs, call), None
        return decode.attend(inputs, call, decay), None
    biased = decay is not None or inputs.bias is not None or inputs.running_bias is not None
    in_blocks = mode != "oracle" and call.queries.is_cpu and not biased and not torch.compiler.is_compiling()
    inputs = inputs.with_branches(tuple(_branch(inputs, call, region, in_blocks) for region in call.regions))
    if torch.compiler.is_compiling() and operator.applies(inputs, decay, mode):
        return operator.attend(inputs, decay, mode), None

    def attend_block(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        return oracle.attend(inputs) if mode == "oracle" else (paths.attend(inputs, mode, call.spans), None)

    return attend_block(inputs) if decay is None else attend_with_decay(inputs, decay, attend_block)


def _by_one_kernel(inputs: AttentionInputs, call: Call, mode: AttentionMode) -> torch.Tensor | None:
    """Output of the fused kernel for all regions; None if it does not apply, or if a path known to be fast does: flash
    per region, or the CPU paths. On an H100, flash per region is faster but for regions of many chunks without
    gradients, and a plan of slots takes less time to start for a few tokens (docs/benchmarks.md).
    """
    queries, biased = call.queries, inputs.bias is not None or inputs.running_bias is not None
    if mode == "auto" and queries.is_cuda:
        flash = isinstance(kernel_for(queries, inputs.value, masked=biased), FlashCUDA) and inputs.fits_kernels
        in_chunks = any(region.chunk > 1 for region in call.regions) and not torch.is_grad_enabled()
        wanted = not flash or ((inputs.q_length == 1 or in_chunks) and not decode.applies(inputs, call, mode, None))
    else:
        wanted = mode == "fused"
    if not wanted or torch.compiler.is_compiling():
        return None
    given = call.fused(not inputs.scattered and (inputs.q_length == 1 or _in_order(inputs, call)))
    return launch.attend(inputs, given) if support.applies(inputs, given) else None


def _in_order(inputs: AttentionInputs, call: Call) -> bool:
    """Whether every distance of a visible pair is that of its slots."""
    spans = call.spans(inputs)
    return spans is not None and not any(span.skips(int(inputs.query_start)) for span in spans)


def _branch(inputs: AttentionInputs, call: Call, region: Region, later: bool) -> Branch:
    """Queries and keys of one region, starting at the oldest key that a query may see there. Queries that are rotated
    `later` bring their rotation.
    """
    if region == ALL_PAIRS:
        return Branch(None, call.query(region), call.key(region))
    first, in_order = 0, isinstance(inputs.query_start, int) and not inputs.scattered
    if in_order and region.translation_invariant and not torch.compiler.is_compiling():
        oldest = decode.slots_of(region, int(inputs.query_start), int(inputs.query_start)).start
        first = min(oldest, inputs.kv_length)  # a text may be too short for a region
    turn = call.query_turn(region) if later else None
    query = call.query(region) if turn is None else call.queries
    return Branch(region, query, call.key(region, slice(first, None)), first, turn)
