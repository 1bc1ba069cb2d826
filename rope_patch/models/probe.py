"""Measuring how an attention module rotates, instead of tabulating it by family.

The module itself is run on four random tokens with tables chosen by us, and the queries and keys that reach its
attention function are compared. With cos 1 and sin 0 nothing turns; with cos 0 and sin 1 every pair makes a quarter
turn, which shows each dimension's partner and sign; with tables of zeros and ones that spell the binary digits of
their own column, each dimension shows which column it reads. All of that is exact in any dtype.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.errors import UnsupportedModel
from rope_patch.models.base import RotaryTables
from rope_patch.schemes.tools.rotary import RotaryLayout

_PROBE = "rope_patch_probe"
_PROBING = threading.RLock()
"""The name is one for all threads, so they probe one after the other."""

_TOKENS = 4
_FOLLOWED = "something follows the rotation of queries and keys (a norm, a scale)"


def measure_layout(name: str, module: nn.Module, rotary: RotaryTables) -> RotaryLayout | None:
    """The rotary layout of a self-attention module; None where its queries and keys do not depend on the tables. Its
    weights, mode and hooks are left as they were.

    Raises:
        UnsupportedModel: when the measurement does not come out clean, e.g. for a norm after the rotation.
    """
    columns = _frequency_of_column(name, rotary)
    width = len(columns)
    digits = torch.tensor([[column >> bit & 1 for column in range(width)] for bit in range(width.bit_length())])
    one, zero = torch.ones(1, width), torch.zeros(1, width)
    random = torch.Generator().manual_seed(0)
    cos_check, sin_check = torch.randn(2, 1, len(set(columns)), generator=random)
    cos_check, sin_check = cos_check[:, list(columns)], sin_check[:, list(columns)]

    cos = torch.cat([one, zero, digits, 0 * digits, cos_check])
    sin = torch.cat([zero, one, 0 * digits, digits, sin_check])
    query, key, _ = _run(module, cos, sin)

    bits = len(digits)
    layout = None
    for states in (query, key):
        still, turned, by_cos, by_sin, checked = states.split([1, 1, bits, bits, 1])
        found = _read_layout(name, still[0], turned[0], by_cos, by_sin, columns)
        if states is key and found != layout:
            raise UnsupportedModel(f"{name}: queries and keys are rotated in different layouts")
        layout = found
        if layout is not None:
            order = [columns.index(frequency) for frequency in range(len(layout.first))]
            expected = layout.rotate(still, cos_check[:, order].to(still), sin_check[:, order].to(still))
            tolerance = 8 * torch.finfo(still.dtype).eps * float(still.abs().max() * cos_check.abs().max())
            if (expected - checked).abs().max() > tolerance:
                raise UnsupportedModel(f"{name}: {_FOLLOWED}")
    return layout


def measure_heads(module: nn.Module, rotary: RotaryTables | None) -> tuple[int, int, int]:
    """Number of query heads, their dimension, and the dimension of one head's values, of a module that is given the
    tables `rotary`, or none.

    Raises:
        UnsupportedModel: when the module does not call the attention interface of Transformers.
    """
    width = 1 if rotary is None else rotary.tables(torch.arange(1)[None])[0].shape[-1]
    query, _, value = _run(module, torch.ones(1, width), torch.zeros(1, width))
    return query.shape[1], query.shape[-1], value.shape[-1]


def reaches_interface(module: nn.Module) -> bool:
    """Whether a self-attention module that takes no tables calls the attention interface of Transformers."""
    try:
        _run(module, torch.ones(1, 1), torch.zeros(1, 1))
    except UnsupportedModel:
        return False
    return True


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its weights are, or where accelerate fetches them to that were offloaded; on the
    CPU where they are packed out of sight, as torch packs what it quantizes for it.

    Raises:
        UnsupportedModel: its weights are nowhere.
    """
    device = next((tensor.device for tensor in _tensors(module)), torch.device("cpu"))
    if device.type != "meta":
        return device
    for child in module.modules():
        place = getattr(getattr(child, "_hf_hook", None), "execution_device", None)
        if place is not None:
            return torch.device(place)
    raise UnsupportedModel(f"{type(module).__name__} has no weights yet (device meta); load them before it is patched")


def dtype_of(module: nn.Module) -> torch.dtype:
    """In which dtype a module computes: that of its weights, where they are no integers."""
    return next((tensor.dtype for tensor in _tensors(module) if tensor.is_floating_point()), torch.get_default_dtype())


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """What a module holds; modules of quantized weights keep them in buffers."""
    return itertools.chain(module.parameters(), module.buffers())


def _frequency_of_column(name: str, rotary: RotaryTables) -> tuple[int, ...]:
    """Which frequency each column of the model's own cos and sin tables belongs to."""
    count = rotary.inv_freq.shape[-1]
    positions = torch.arange(1, 17)[None]
    if _reads_planes(rotary, positions):
        raise UnsupportedModel(
            f"{name}: its rotary module reads positions in several dimensions (mRoPE, for images), "
            "and a scheme places tokens in one"
        )
    try:
        tables = rotary.tables(positions)
    except Exception as error:  # a rotary module with another signature
        raise UnsupportedModel(f"{name}: its rotary tables cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(tables, torch.Tensor):
        raise UnsupportedModel(f"{name}: its rotary module gives one complex table in place of cos and sin")
    cos, sin = (table[0] for table in tables)
    orders = {
        count: [tuple(range(count))],
        2 * count: [tuple(range(count)) * 2, tuple(i // 2 for i in range(2 * count))],
    }
    for order in orders.get(cos.shape[-1], []):
        first = [order.index(i) for i in range(count)]
        if torch.equal(cos[:, first][:, list(order)], cos) and torch.equal(sin[:, first][:, list(order)], sin):
            return order
    raise UnsupportedModel(f"{name}: rotary tables of width {cos.shape[-1]} for {count} frequencies")


def _reads_planes(rotary: RotaryTables, positions: torch.Tensor) -> bool:
    """Whether three planes of positions become one table; any other module makes one of each plane, or fails."""
    try:
        tables = rotary.tables(positions[None].expand(3, -1, -1))
    except Exception:  # whatever a family raises, it does not read them
        return False
    return isinstance(tables, tuple) and tables[0].shape[:2] == positions.shape


def _run(module: nn.Module, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values `(settings, heads, tokens, head_dim)` for tables `(settings, width)`."""
    captured: list[torch.Tensor] = []

    def capture(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        captured.extend(states.detach().clone() for states in (query, key, value))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    random = torch.Generator().manual_seed(0)
    hidden_size = cast(Any, module.config).hidden_size
    hidden = torch.randn(1, _TOKENS, hidden_size, generator=random)
    hidden = hidden.expand(len(cos), -1, -1).to(device_of(module), dtype_of(module))
    tables = [table[:, None].expand(-1, _TOKENS, -1).to(hidden) for table in (cos, sin)]
    arguments = {
        "hidden_states": hidden,
        "position_embeddings": tuple(tables),
        "attention_mask": None,
        "position_ids": torch.arange(_TOKENS, device=hidden.device)[None],
    }
    accepted = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    arguments = {key: value for key, value in arguments.items() if takes_any or key in accepted}
    needed = [name for name, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if unknown := [name for name in needed if name not in arguments]:
        raise UnsupportedModel(f"{type(module).__name__} requires {', '.join(unknown)}, which is not understood here")
    try:
        with probing(module, capture), torch.no_grad():
            module(**arguments)
    except Exception as error:  # whatever a family raises, it means that the seam is not the one we know
        raise UnsupportedModel(
            f"{type(module).__name__} cannot be measured: {type(error).__name__}: {error}"
        ) from error
    if len(captured) != 3:
        raise UnsupportedModel(f"{type(module).__name__} does not call the attention interface of Transformers")
    query, key, value = captured
    return query, key, value


@contextlib.contextmanager
def probing(module: nn.Module, capture: Any) -> Iterator[None]:
    """Let the module call `capture` as its attention function, in evaluation mode; put everything back."""
    config, modes = cast(Any, module.config), [(child, child.training) for child in module.modules()]
    probing = copy.copy(config)
    probing._attn_implementation_internal = _PROBE
    with _PROBING:
        ALL_ATTENTION_FUNCTIONS[_PROBE] = capture
        try:
            module.config = probing
            module.eval()
            yield
        finally:
            module.config = config
            for child, mode in modes:
                child.training = mode
            del ALL_ATTENTION_FUNCTIONS[_PROBE]


def _read_layout(
    name: str,
    still: torch.Tensor,
    turned: torch.Tensor,
    by_cos: torch.Tensor,
    by_sin: torch.Tensor,
    columns: tuple[int, ...],
) -> RotaryLayout | None:
    """The layout from `(heads, tokens, head_dim)` states and from those under binary tables."""
    signature, quarter = still.flatten(0, 1), turned.flatten(0, 1)
    rotated = [i for i in range(signature.shape[-1]) if not torch.equal(signature[:, i], quarter[:, i])]
    if not rotated:
        return None
    firsts: dict[int, int] = {}
    seconds: dict[int, int] = {}
    for i in rotated:
        plus = (signature == quarter[:, i, None]).all(0).nonzero().flatten().tolist()
        minus = (signature == -quarter[:, i, None]).all(0).nonzero().flatten().tolist()
        if len(plus) + len(minus) != 1:
            raise UnsupportedModel(f"{name}: dimension {i} of the heads has no clear partner: {_FOLLOWED}")
        by_own = columns[_spelled(name, by_cos[..., i], still[..., i])]
        if columns[_spelled(name, by_sin[..., i], turned[..., i])] != by_own:
            raise UnsupportedModel(f"{name}: dimension {i} of the heads reads cos and sin of different frequencies")
        # a quarter turn of the pair (a, b) is (-b, a): the dimension that turned negative is the first
        first, second = (i, minus[0]) if minus else (plus[0], i)
        if firsts.setdefault(by_own, first) != first or seconds.setdefault(by_own, second) != second:
            raise UnsupportedModel(f"{name}: frequency {by_own} turns more than one pair of dimensions")
    order = sorted(firsts)
    if order != sorted(seconds) or order != list(range(len(order))) or 2 * len(order) != len(rotated):
        raise UnsupportedModel(f"{name}: the pairs of the rotation do not come out clean")
    return RotaryLayout(tuple(firsts[i] for i in order), tuple(seconds[i] for i in order))


def _spelled(name: str, digits: torch.Tensor, reference: torch.Tensor) -> int:
    """The column whose binary digits are spelled by where `(bits, heads, tokens)` equals the reference or zero."""
    column = 0
    for bit, values in enumerate(digits):
        if torch.equal(values, reference):
            column |= 1 << bit
        elif values.any():
            raise UnsupportedModel(f"{name}: {_FOLLOWED}")
    return column
