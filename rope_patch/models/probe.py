"""Measuring how an attention module rotates, instead of tabulating it by family.

The module itself is run on four random tokens with tables chosen by us, and the queries and keys that reach its
attention function are compared. With cos 1 and sin 0 nothing turns; with cos 0 and sin 1 every pair makes a quarter
turn, which shows each dimension's partner and sign; with such tables that spell the binary digits of the frequency of
each column, each dimension shows which frequency it reads. All of that is exact in any dtype.

With cos 2 queries and keys double, unless a norm follows the rotation. A norm over whole heads without weights of its
own turns with them, so the measurement comes out the same, up to rounding; weights are found out by changing them.

Layers of one kind are measured once, on a stand-in with random weights. So neither the width nor the number of layers
costs much, and no weights are needed. What a stand-in cannot run as the module would, or what does not come out clean
on it, is measured on the module itself.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.func import functional_call
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.errors import UnsupportedModel
from rope_patch.models.arguments import by_name
from rope_patch.models.base import Heads, RotaryTables
from rope_patch.models.stand_in import StandIns, kind_of, part_of
from rope_patch.schemes.tools.rotary import RotaryLayout

_PROBE = "rope_patch_probe"
_PROBING = threading.RLock()
"""The name is one for all threads, so they probe one after the other."""

_TOKENS = 4
_AXES = (2, 3, 4)
"""How many axes of positions a rotary module may read; families of today read three, and HunYuan-VL up to four."""
_ROWS = 16
"""By how many vectors the partner of a dimension is looked for."""
_ULPS = 4
"""By how many units in the last place a norm may differ that sums the dimensions of a head in another order."""
_FOLLOWED = "something follows the rotation of queries and keys (a norm, a scale)"

Found = TypeVar("Found")


class Turning(NamedTuple):
    """What an attention module does with its tables.

    Attributes:
        layout: None where queries and keys do not depend on the tables.
        normed: whether a norm follows that the rotation commutes with.
        heads: their number and sizes.
    """

    layout: RotaryLayout | None
    normed: bool
    heads: Heads


class Measuring:
    """Measures the layers of a stack, each kind of them once."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def turning(self, name: str, block: nn.Module, module: nn.Module, rotary: RotaryTables) -> tuple[Turning, bool]:
        """`measure_layout` and `is_told_positions`, of this layer and its block or of others of their kind.

        A block that cannot be run on its own is taken to tell, as nearly all do.
        """
        kind = (rotary.layer_type, kind_of(module))
        turning = self._once(kind, module, module, lambda tried, _: measure_layout(name, tried, rotary))
        around = (part_of(block), *map(type, block.children()))
        try:
            told = self._once(
                (kind, around), block, module, lambda tried, inner: is_told_positions(tried, inner, rotary)
            )
        except UnsupportedModel:
            told = True
        return turning, told

    def heads(self, module: nn.Module) -> Heads:
        """`measure_heads`, of this layer, which is given no tables, or of another one of its kind."""
        return self._once(kind_of(module), module, module, lambda tried, _: measure_heads(tried))

    def _once(
        self, kind: Hashable, outer: nn.Module, inner: nn.Module, measure: Callable[[nn.Module, nn.Module], Found]
    ) -> Found:
        """What `measure` finds of a module and of one inside it."""
        if kind in self._found:
            return self._found[kind]
        device = _device_of(inner)
        stand_ins = StandIns(device or torch.device("cpu"))
        try:
            found = measure(stand_ins.of(outer), stand_ins.of(inner))
        except Exception as error:  # whatever a family does that a copy of it cannot
            if device is None:
                raise UnsupportedModel(
                    f"{error} (tried without its weights, which are on the device meta: load them before it is patched)"
                ) from error
            return measure(outer, inner)
        if not stand_ins.index_was_read:  # else another layer of this kind may be another thing
            self._found[kind] = found
        return found


def measure_tables(rotary: RotaryTables) -> RotaryTables:
    """The same, with the form in which its module reads positions and gives tables."""
    positions = torch.arange(1, 17)[None]

    def shape_of(axes: int) -> tuple[Any, tuple[int, ...]]:
        try:
            given = dataclasses.replace(rotary, axes=axes).given(positions)
        except Exception:  # whatever a family raises, it does not read as many axes
            return None, ()
        return given, tuple((given[0] if isinstance(given, tuple) else given).shape[:2])

    # a module that reads one axis makes a table of each plane, or fails; on several, all become one table
    axes = next((axes for axes in _AXES if shape_of(axes)[1] == positions.shape), 1)
    given, _ = shape_of(axes)
    return dataclasses.replace(rotary, axes=axes, is_complex=isinstance(given, torch.Tensor) and given.is_complex())


def measure_layout(name: str, module: nn.Module, rotary: RotaryTables) -> Turning:
    """How a self-attention module rotates, which is left as it was.

    Raises:
        UnsupportedModel: when the measurement does not come out clean, e.g. for a norm with weights after the rotation.
    """
    columns = torch.tensor(_frequency_of_column(name, rotary))
    count = int(columns.max()) + 1
    digits = torch.stack([columns >> bit & 1 for bit in range(max(1, (count - 1).bit_length()))]).float()
    one, zero = torch.ones(1, len(columns)), torch.zeros(1, len(columns))
    angles = torch.randn(1, count, generator=torch.Generator().manual_seed(0))
    cos = torch.cat([one, zero, 1 - digits, angles.cos()[:, columns], 2 * one])
    sin = torch.cat([zero, one, digits, angles.sin()[:, columns], zero])

    query, key, value = _run(module, rotary, cos, sin)
    heads = Heads(query.shape[1], query.shape[-1], value.shape[-1])
    normed = not (_doubles(query) and _doubles(key))
    if normed:
        query, key = _run(module, rotary, cos, sin, with_other_vectors=True)[:2]
    layouts = [_read_layout(name, states[:-2], normed) for states in (query, key)]
    if layouts[0] != layouts[1]:
        raise UnsupportedModel(f"{name}: queries and keys are rotated in different layouts")
    if (layout := layouts[0]) is None:
        return Turning(None, False, heads)
    for states in (query, key):
        expected = layout.rotate(states[:1], angles.cos().to(states), angles.sin().to(states))
        tolerance = 8 * torch.finfo(states.dtype).eps * float(states[0].abs().max())
        if (expected - states[-2]).abs().max() > tolerance:
            raise UnsupportedModel(f"{name}: {_FOLLOWED}")
    return Turning(layout, normed, heads)


def measure_heads(module: nn.Module) -> Heads:
    """The sizes of the heads of a self-attention module that is given no tables.

    Raises:
        UnsupportedModel: when the module does not call the attention interface of Transformers.
    """
    query, _, value = _run(module, None, torch.ones(1, 1), torch.zeros(1, 1))
    return Heads(query.shape[1], query.shape[-1], value.shape[-1])


def is_told_positions(block: nn.Module, module: nn.Module, rotary: RotaryTables) -> bool:
    """Whether a block hands its self-attention module the positions that it is given.

    Raises:
        UnsupportedModel: when the block cannot be run on its own.
    """
    hidden = _hidden(module)
    handle = module.register_forward_pre_hook(_Reached.stop, with_kwargs=True)
    try:
        tables = rotary.given(torch.arange(_TOKENS)[None], like=hidden)
        with torch.no_grad():
            block.forward(**_arguments(block, hidden, tables))
    except _Reached as reached:
        return reached.is_told
    except Exception as error:  # whatever a family raises, its block wants more
        raise UnsupportedModel(f"{type(block).__name__} cannot be run on its own: {error}") from error
    finally:
        handle.remove()
    raise UnsupportedModel(f"{type(block).__name__} does not call its {type(module).__name__}")


class _Reached(BaseException):  # not an Exception: nothing that a model catches
    """Ends a forward where it comes to attention."""

    def __init__(self, is_told: bool) -> None:
        self.is_told = is_told

    @classmethod
    def stop(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise cls(by_name(module, args, kwargs).get("position_ids") is not None)


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its weights are, or where accelerate fetches them to that were offloaded; on the
    CPU where they are packed out of sight, as torch packs what it quantizes for it.

    Raises:
        UnsupportedModel: its weights are nowhere.
    """
    if (device := _device_of(module)) is None:
        raise UnsupportedModel(
            f"{type(module).__name__} has no weights yet (device meta); load them before it is patched"
        )
    return device


def _device_of(module: nn.Module) -> torch.device | None:
    device = next((tensor.device for tensor in _tensors(module)), torch.device("cpu"))
    if device.type != "meta":
        return device
    hooks = (getattr(child, "_hf_hook", None) for child in module.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(place) for place in places if place is not None), None)


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
    try:
        tables = rotary.tables(positions)
        cos, sin = (table[0] for table in tables)
    except Exception as error:  # a rotary module with another signature
        raise UnsupportedModel(f"{name}: its rotary tables cannot be read: {type(error).__name__}: {error}") from error
    if cos.ndim != 2:
        raise UnsupportedModel(f"{name}: its rotary module gives tables of shape {tuple(tables[0].shape)}")
    orders = [tuple(range(count)), tuple(range(count)) * 2, tuple(i // 2 for i in range(2 * count))]
    for order in (order for order in orders if len(order) == cos.shape[-1]):
        first = [order.index(i) for i in range(count)]
        if torch.equal(cos[:, first][:, list(order)], cos) and torch.equal(sin[:, first][:, list(order)], sin):
            return order
    raise UnsupportedModel(f"{name}: rotary tables of width {cos.shape[-1]} for {count} frequencies")


def _run(
    module: nn.Module,
    rotary: RotaryTables | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    with_other_vectors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values `(settings, heads, tokens, head_dim)` for tables `(settings, width)`, in the form of
    those of `rotary`; also with other biases and weights of norms than the module has.
    """
    captured: list[torch.Tensor] = []

    def capture(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        captured.extend(states.detach().clone() for states in (query, key, value))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    hidden = _hidden(module).expand(len(cos), -1, -1)
    cos, sin = (table[:, None].expand(-1, _TOKENS, -1).to(hidden) for table in (cos, sin))
    vectors = {name: vector for name, vector in module.named_parameters() if vector.ndim == 1 and with_other_vectors}
    random = torch.Generator().manual_seed(0)
    others = {name: v + 0.5 * torch.randn(v.shape, generator=random).to(v) for name, v in vectors.items()}
    arguments = _arguments(module, hidden, (cos, sin) if rotary is None else rotary.joined(cos, sin))
    try:
        with probing(module, capture), torch.no_grad():
            functional_call(module, others, (), arguments) if others else module(**arguments)
    except Exception as error:  # whatever a family raises, it means that the seam is not the one we know
        raise UnsupportedModel(
            f"{type(module).__name__} cannot be measured: {type(error).__name__}: {error}"
        ) from error
    if len(captured) != 3:
        raise UnsupportedModel(f"{type(module).__name__} does not call the attention interface of Transformers")
    query, key, value = captured
    return query, key, value


def _hidden(module: nn.Module) -> torch.Tensor:
    """What enters an attention module: four random tokens, `(1, tokens, hidden)`."""
    hidden_size = cast(Any, module.config).hidden_size
    hidden = torch.randn(1, _TOKENS, hidden_size, generator=torch.Generator().manual_seed(0))
    return hidden.to(device_of(module), dtype_of(module))


def _arguments(module: nn.Module, hidden: torch.Tensor, tables: Any) -> dict[str, Any]:
    """Those that a module with these states and tables is called with.

    Raises:
        UnsupportedModel: it requires others.
    """
    arguments = {
        "hidden_states": hidden,
        "position_embeddings": tables,
        "attention_mask": None,
        "position_ids": torch.arange(_TOKENS, device=hidden.device)[None],
    }
    accepted = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    needed = [name for name, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if unknown := [name for name in needed if name not in arguments]:
        raise UnsupportedModel(f"{type(module).__name__} requires {', '.join(unknown)}, which is not understood here")
    return {key: value for key, value in arguments.items() if takes_any or key in accepted}


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


def _doubles(states: torch.Tensor) -> bool:
    """Whether what turns is doubled by tables that are, `states[-1]`, and nothing else changes."""
    turns = (states[1] != states[0]).flatten(0, 1).any(dim=0)
    return torch.equal(states[-1], torch.where(turns, 2 * states[0], states[0]))


def _read_layout(name: str, states: torch.Tensor, rounded: bool) -> RotaryLayout | None:
    """The layout from states `(2 + bits, heads, tokens, head_dim)`: unturned, after quarter turns of all pairs, and of
    those whose frequency has a bit.
    """
    tolerance = _ULPS * torch.finfo(states.dtype).eps if rounded else 0.0

    def alike(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """By channel, over `(heads * tokens, channels)`."""
        return ((found - expected).abs() <= tolerance * expected.abs()).all(dim=0)

    still, turned, *by_bit = states.cpu().flatten(1, 2)
    rotated = (~alike(turned, still)).nonzero().flatten().tolist()
    if not rotated:
        return None
    few = slice(None, None, max(1, len(still) // _ROWS))  # to find partners by; all rows have to agree on them
    plus, minus = (alike(turned[few, :, None], sign * still[few, None]) for sign in (1, -1))
    of_plus, of_minus = plus.int().argmax(dim=1), minus.int().argmax(dim=1)
    agrees = torch.where(minus.any(dim=1), alike(turned, -still[:, of_minus]), alike(turned, still[:, of_plus]))
    is_clear = ((plus.sum(dim=1) + minus.sum(dim=1) == 1) & agrees).tolist()
    turns = [alike(found, turned).tolist() for found in by_bit]
    stays = [alike(found, still).tolist() for found in by_bit]
    firsts: dict[int, int] = {}
    seconds: dict[int, int] = {}
    for i in rotated:
        if not is_clear[i]:
            raise UnsupportedModel(f"{name}: dimension {i} of the heads has no clear partner: {_FOLLOWED}")
        if not all(turn[i] or stay[i] for turn, stay in zip(turns, stays, strict=True)):
            raise UnsupportedModel(f"{name}: dimension {i} reads cos and sin of several frequencies, or {_FOLLOWED}")
        frequency = sum(turn[i] << bit for bit, turn in enumerate(turns))
        # a quarter turn of the pair (a, b) is (-b, a): the dimension that turned negative is the first
        first, second = (i, int(of_minus[i])) if minus[i].any() else (int(of_plus[i]), i)
        if firsts.setdefault(frequency, first) != first or seconds.setdefault(frequency, second) != second:
            raise UnsupportedModel(f"{name}: frequency {frequency} turns more than one pair of dimensions")
    order = sorted(firsts)
    if order != sorted(seconds) or order != list(range(len(order))) or 2 * len(order) != len(rotated):
        raise UnsupportedModel(f"{name}: the pairs of the rotation do not come out clean")
    return RotaryLayout(tuple(firsts[i] for i in order), tuple(seconds[i] for i in order))
