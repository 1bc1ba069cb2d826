"""Measure how an attention module rotates, instead of tabulating it by family.

The module runs on four random tokens with test tables, and the queries and keys that reach its attention function are
compared. With cos 1 and sin 0 nothing rotates. With cos 0 and sin 1 every pair makes a quarter turn, which shows each
dimension's partner and sign. Tables with the binary digits of each column's frequency index show which frequency a
dimension reads. All of this is exact in any dtype.

With cos 2 queries and keys double, unless a norm follows the rotation. A norm over whole heads without weights commutes
with the rotation, so the measurement stays the same, up to rounding. To detect weights, the probe changes them. If a
copy (see `probe_copy`) cannot run or its measurement is inconsistent, the module itself is measured.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.func import functional_call
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.errors import UnsupportedModel
from rope_patch.models.arguments import by_name, parameters_of
from rope_patch.models.base import Heads, RotaryTables
from rope_patch.models.probe_copy import ProbeCopies, kind_of, part_of
from rope_patch.schemes.tools.rotary import RotaryLayout, rotation_tables
from rope_patch.typing import Frequencies

_PROBE = "rope_patch_probe"
_PROBING = threading.RLock()  # all threads share the name, so they probe one after the other

_TOKENS = 4
_PLACES = torch.arange(1, 17, device="cpu")[None]  # positions at which tables are measured
_AXES = (2, 3, 4)
"""Numbers of position axes that a rotary module may read; current families read three, HunYuan-VL up to four."""
_ROWS = 16  # number of vectors in the search for a dimension's partner
_ULPS = 4  # tolerance in units in the last place for a norm that sums the dimensions of a head in another order
_CHANGED = "something follows the rotation of queries and keys (a norm, a scale)"
_VALUES = "its values rotate with its keys, so another distance would change what is summed"

Measured = TypeVar("Measured")


class ChangedAfterRotation(UnsupportedModel):
    """Raised for a module that changes queries or keys after their rotation, for example by a norm with weights."""


class TurnedValues(UnsupportedModel):
    """Raised for a module whose values rotate with the keys."""


class Rotation(NamedTuple):
    """The rotation of an attention module. Its `layout` is None if queries and keys do not depend on the tables; it is
    `normed` if a norm behind it commutes with the rotation.
    """

    layout: RotaryLayout | None
    normed: bool
    heads: Heads


class Measuring:
    """A cache of measurements of a stack's layers; each kind of layer is measured once."""

    def __init__(self) -> None:
        self._by_kind: dict[Hashable, Any] = {}

    def rotation(
        self, name: str, block: nn.Module, module: nn.Module, rotary: RotaryTables
    ) -> tuple[Rotation, bool | None]:
        """Run `measure_layout` and `passes_positions` for this layer and its block, unless their kind was measured
        before.

        A block that cannot run alone is assumed to pass positions if it names them, as nearly all blocks do.
        """
        kind = (rotary.layer_type, kind_of(module))
        rotation = self._once_a_kind(kind, module, module, lambda tried, _: measure_layout(name, tried, rotary))
        around = (part_of(block), name.rpartition(".")[2], *map(type, block.children()))
        try:
            gets_positions = self._once_a_kind(
                (kind, around), block, module, lambda tried, inner: passes_positions(tried, inner, rotary)
            )
        except UnsupportedModel:
            gets_positions = _names_positions(block)
        return rotation, gets_positions

    def choice(self, module: nn.Module, rotary: Sequence[RotaryTables]) -> RotaryTables | None:
        """Run `measure_choice` for this layer, unless its kind was measured before."""
        kind = ("choice", kind_of(module))
        return self._once_a_kind(kind, module, module, lambda tried, _: measure_choice(tried, rotary))

    def heads(self, module: nn.Module) -> Heads:
        """Run `measure_heads` for this layer, which receives no tables, unless its kind was measured before."""
        return self._once_a_kind(kind_of(module), module, module, lambda tried, _: measure_heads(tried))

    def _once_a_kind(
        self, kind: Hashable, outer: nn.Module, inner: nn.Module, measure: Callable[[nn.Module, nn.Module], Measured]
    ) -> Measured:
        """Measure a module and a module inside it, on copies, once for each kind."""
        if kind in self._by_kind:
            return self._by_kind[kind]
        device = _device_of(inner)
        copies = ProbeCopies(device or torch.device("cpu"))
        try:
            measured = measure(copies.of(outer), copies.of(inner))
        except Exception as error:  # a copy cannot run everything that a family does
            if device is None:
                raise UnsupportedModel(
                    f"{error} (tried without its weights, which are on the device meta: load them before you patch it)"
                ) from error
            return measure(outer, inner)
        if not copies.index_was_read:  # else other layers of this kind may differ
            self._by_kind[kind] = measured
        return measured


def measure_tables(rotary: RotaryTables) -> RotaryTables:
    """Measure the form of the positions and outputs of the tables' module, and note it in the tables."""

    def shape_of(axes: int) -> tuple[Any, tuple[int, ...]]:
        try:
            computed = dataclasses.replace(rotary, axes=axes).compute(_PLACES)
        except Exception:  # any error means that it does not read this many axes
            return None, ()
        return computed, tuple((computed[0] if isinstance(computed, tuple) else computed).shape[:2])

    # a module that reads one axis returns a table per plane, or fails; with several axes it returns one table
    axes = next((axes for axes in _AXES if shape_of(axes)[1] == _PLACES.shape), 1)
    computed, _ = shape_of(axes)
    return dataclasses.replace(
        rotary, axes=axes, is_complex=isinstance(computed, torch.Tensor) and computed.is_complex()
    )


def follows_buffers(rotary: RotaryTables) -> bool:
    """Whether the module computes its tables from its `inv_freq` and `attention_scaling`: NaN in them appears in the
    tables.
    """

    def reads(*names: str) -> bool:
        own = {
            name: getattr(rotary.module, name) for name in map(rotary.attribute, names) if hasattr(rotary.module, name)
        }
        try:
            for name, value in own.items():
                setattr(rotary.module, name, value * math.nan)
            return all(bool(table.isnan().any()) for table in _tables_at(rotary, _PLACES))
        finally:
            for name, value in own.items():
                setattr(rotary.module, name, value)

    return reads("inv_freq", "original_inv_freq") and reads("attention_scaling")


def measure_fixed(rotary: RotaryTables, training_length: int) -> Frequencies:
    """Measure the frequencies and the factor of a module whose tables do not follow its buffers.

    Raises:
        UnsupportedModel: the tables do not follow from the module's `inv_freq`, or depend on the length of the text.
    """
    beyond = torch.tensor([[2 * training_length]])
    near, far = (_tables_at(rotary, places)[0] for places in (_PLACES, torch.cat([_PLACES, beyond], dim=1)))
    scaling = float(_tables_at(rotary, torch.zeros_like(beyond))[0].max())
    cos = rotation_tables(_PLACES, rotary.inv_freq.cpu(), scaling, near.dtype)[0][0]
    cos = cos.repeat(1, 1, near.shape[-1] // cos.shape[-1])
    by_inv_freq = near.shape == cos.shape and torch.allclose(near.sort().values, cos.sort().values, atol=1e-5)
    if not by_inv_freq or not torch.equal(near, far[:, :-1]):
        raise UnsupportedModel(
            f"{type(rotary.module).__name__} does not rotate by its inv_freq, or by another factor in longer texts"
        )
    return Frequencies(rotary.inv_freq.clone(), scaling)


class _Choices(dict[str | None, Any]):
    """Tables by name, in a dict that notes the names that are read."""

    def __init__(self, tables: dict[str | None, Any]) -> None:
        super().__init__(tables)
        self.read: set[str | None] = set()

    def __getitem__(self, name: str | None) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def measure_choice(module: nn.Module, rotary: Sequence[RotaryTables]) -> RotaryTables | None:
    """Measure which set of tables an attention module takes out of a dict of all sets; None if it takes no dict."""
    hidden = _random_input(module)
    places = torch.arange(_TOKENS)[None]
    choices = _Choices({tables.layer_type: tables.compute(places, like=hidden) for tables in rotary})

    def skip(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        return value, None

    # an error after they were read is none
    with probing(module, skip), torch.no_grad(), contextlib.suppress(Exception):
        module(**_arguments(module, hidden, choices))
    chosen = next((tables for tables in rotary if choices.read == {tables.layer_type}), None)
    return chosen and dataclasses.replace(chosen, choices=tuple(map(str, choices)))


def measure_layout(name: str, module: nn.Module, rotary: RotaryTables) -> Rotation:
    """Measure how a self-attention module rotates; the module stays unchanged.

    Raises:
        UnsupportedModel: the measurement is inconsistent, e.g. for a norm with weights after the rotation.
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
    if (value[1] - value[0]).abs().max() > 1e-2 * value[0].abs().max():
        raise TurnedValues(_VALUES)
    normed = not (_doubles(query) and _doubles(key))
    if normed:
        query, key = _run(module, rotary, cos, sin, with_other_vectors=True)[:2]
    layouts = [_read_layout(name, states[:-2], normed) for states in (query, key)]
    if layouts[0] != layouts[1]:
        raise UnsupportedModel(f"{name}: queries and keys are rotated in different layouts")
    if (layout := layouts[0]) is None:
        return Rotation(None, False, heads)
    for states in (query, key):
        expected = layout.rotate(states[:1], angles.cos().to(states), angles.sin().to(states))
        tolerance = 8 * torch.finfo(states.dtype).eps * float(states[0].abs().max())
        if (expected - states[-2]).abs().max() > tolerance:
            raise ChangedAfterRotation(f"{name}: {_CHANGED}")
    return Rotation(layout, normed, heads)


def measure_heads(module: nn.Module) -> Heads:
    """Measure the sizes of the heads of a self-attention module that receives no tables.

    Raises:
        UnsupportedModel: the module does not call the attention interface of Transformers.
    """
    query, _, value = _run(module, None, torch.ones(1, 1), torch.zeros(1, 1))
    return Heads(query.shape[1], query.shape[-1], value.shape[-1])


def _names_positions(block: nn.Module) -> bool:
    return "position_ids" in parameters_of(block)


def passes_positions(block: nn.Module, module: nn.Module, rotary: RotaryTables) -> bool | None:
    """Whether a block passes its position ids to its self-attention module; None for cross-attention, which it does not
    call without an encoder. A block that does not name them may pass other arguments, but its stack gives it none
    (Zaya, ModernBERT).

    Raises:
        UnsupportedModel: the block cannot run alone.
    """

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _AttentionReached(by_name(module, args, kwargs).get("position_ids") is not None)

    hidden = _random_input(module)
    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        tables = rotary.compute(torch.arange(_TOKENS)[None], like=hidden)
        with torch.no_grad():
            block.forward(**_arguments(block, hidden, rotary.offered(tables)))
    except _AttentionReached as reached:
        return reached.args[0] and _names_positions(block)
    except Exception as error:  # any error means that the block needs other arguments
        raise UnsupportedModel(f"{type(block).__name__} cannot run alone: {error}") from error
    finally:
        handle.remove()
    return None


class _AttentionReached(BaseException):  # not an Exception, so that no model catches it
    """Raised to end a forward when it reaches attention; its argument says whether positions arrive there."""


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module computes: the device of its weights, or the one to which accelerate moves offloaded
    weights; the CPU if the weights are packed, as in torch's quantization for CPUs.

    Raises:
        UnsupportedModel: the module has no weights yet.
    """
    if (device := _device_of(module)) is None:
        raise UnsupportedModel(
            f"{type(module).__name__} has no weights yet (device meta); load them before you patch it"
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
    """The dtype in which a module computes: the dtype of its floating-point weights."""
    return next((tensor.dtype for tensor in _tensors(module) if tensor.is_floating_point()), torch.get_default_dtype())


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers; modules with quantized weights keep these in buffers."""
    return itertools.chain(module.parameters(), module.buffers())


def _tables_at(rotary: RotaryTables, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `RotaryTables.tables`, and move them to the CPU."""
    try:
        cos, sin = rotary.tables(positions)
    except Exception as error:  # a rotary module with another signature
        family = type(rotary.module).__name__
        raise UnsupportedModel(
            f"{family}: its rotary tables cannot be read: {type(error).__name__}: {error}"
        ) from error
    return cos.cpu(), sin.cpu()


def _frequency_of_column(name: str, rotary: RotaryTables) -> tuple[int, ...]:
    """The frequency index of each column of the model's own cos and sin tables."""
    count = rotary.inv_freq.shape[-1]
    tables = _tables_at(rotary, _PLACES)
    cos, sin = (table[0] for table in tables)
    if cos.ndim != 2:
        raise UnsupportedModel(f"{name}: its rotary module returns tables of shape {tuple(tables[0].shape)}")
    orders = [tuple(range(count)), tuple(range(count)) * 2, tuple(i // 2 for i in range(2 * count))]
    for order in (order for order in orders if len(order) == cos.shape[-1]):
        first = [order.index(i) for i in range(count)]
        if torch.equal(cos[:, first][:, list(order)], cos) and torch.equal(sin[:, first][:, list(order)], sin):
            numbers = _numbers_of(sin[:, first], rotary)
            return tuple(numbers[i] for i in order)
    raise UnsupportedModel(f"{name}: rotary tables of width {cos.shape[-1]} for {count} frequencies")


def _numbers_of(sines: torch.Tensor, rotary: RotaryTables) -> list[int]:
    """The index in `inv_freq` of the frequency of each column, `(places, frequencies)`: some modules keep them in
    another order than their tables (Ernie 4.5 VL, by image axis). A column that matches none keeps its place.
    """
    inv_freq = rotary.inv_freq.flatten().to(sines)
    expected = (_PLACES.to(sines).mT * inv_freq).sin() * rotary.attention_scaling
    in_place = list(range(len(inv_freq)))
    if torch.allclose(sines, expected, atol=1e-4):
        return in_place
    nearest = torch.cdist(sines.T, expected.T).argmin(dim=1)
    is_order = sorted(nearest.tolist()) == in_place and torch.allclose(sines, expected[:, nearest], atol=1e-4)
    return nearest.tolist() if is_order else in_place


def _run(
    module: nn.Module,
    rotary: RotaryTables | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    with_other_vectors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a module on tables `(settings, width)` in the form of `rotary`, and capture its queries, keys and values,
    `(settings, heads, tokens, head_dim)`; optionally with changed biases and norm weights.
    """
    captured: list[torch.Tensor] = []

    def capture(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        captured.extend(states.detach().clone() for states in (query, key, value))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    hidden = _random_input(module).expand(len(cos), -1, -1)
    cos, sin = (table[:, None].expand(-1, _TOKENS, -1).to(hidden) for table in (cos, sin))
    vectors = {name: vector for name, vector in module.named_parameters() if vector.ndim == 1 and with_other_vectors}
    random = torch.Generator().manual_seed(0)
    others = {name: v + 0.5 * torch.randn(v.shape, generator=random).to(v) for name, v in vectors.items()}
    tables = (cos, sin) if rotary is None else rotary.offered(rotary.joined(cos, sin))
    arguments = _arguments(module, hidden, tables)
    every = torch.ones(len(cos), 1, _TOKENS, _TOKENS, dtype=torch.bool, device=hidden.device)
    for mask in (None, every):  # some read the mask before they attend
        captured.clear()
        if "attention_mask" in arguments:
            arguments["attention_mask"] = mask
        try:
            with probing(module, capture), torch.no_grad():
                functional_call(module, others, (), arguments) if others else module(**arguments)
            break
        except Exception as error:  # any error means that the module's interface is not the expected one
            if mask is not None:
                raise UnsupportedModel(
                    f"{type(module).__name__} cannot be measured: {type(error).__name__}: {error}"
                ) from error
    if len(captured) != 3:
        raise UnsupportedModel(
            f"{type(module).__name__} calls the attention interface of Transformers {len(captured) // 3} times"
        )
    query, key, value = captured
    return query, key, value


def _random_input(module: nn.Module) -> torch.Tensor:
    """A random input of an attention module: four tokens, `(1, tokens, hidden)`."""
    if not hasattr(module, "config"):
        raise UnsupportedModel(f"{type(module).__name__} has no config, which names the attention function")
    hidden_size = cast(Any, module.config).hidden_size
    hidden = torch.randn(1, _TOKENS, hidden_size, generator=torch.Generator().manual_seed(0))
    return hidden.to(device_of(module), dtype_of(module))


def _arguments(module: nn.Module, hidden: torch.Tensor, tables: Any) -> dict[str, Any]:
    """Build the arguments for a call of a module with these states and tables.

    Raises:
        UnsupportedModel: the module requires other arguments.
    """
    arguments = {
        "hidden_states": hidden,
        "position_embeddings": tables,
        "attention_mask": None,
        "shared_kv_states": {},  # read by layers that share the keys of this one
        "position_ids": torch.arange(_TOKENS, device=hidden.device)[None],
    }
    accepted = parameters_of(module)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    needed = [name for name, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if unknown := [name for name in needed if name not in arguments]:
        raise UnsupportedModel(f"{type(module).__name__} requires {', '.join(unknown)}, which is not supported")
    return {key: value for key, value in arguments.items() if takes_any or key in accepted}


@contextlib.contextmanager
def probing(module: nn.Module, capture: Any) -> Iterator[None]:
    """Let the module call `capture` as its attention function, in evaluation mode, then restore everything."""
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
    """Whether doubled tables, `states[-1]`, double the rotating dimensions and change nothing else."""
    turns = (states[1] != states[0]).flatten(0, 1).any(dim=0)
    return torch.equal(states[-1], torch.where(turns, 2 * states[0], states[0]))


def _read_layout(name: str, states: torch.Tensor, rounded: bool) -> RotaryLayout | None:
    """Derive the layout from states `(2 + bits, heads, tokens, head_dim)`: without rotation, after quarter turns of all
    pairs, and, for each bit, after quarter turns of the pairs whose frequency index has the bit.
    """
    tolerance = _ULPS * torch.finfo(states.dtype).eps if rounded else 0.0

    def alike(products: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Whether products equal the expected ones, for each channel of `(heads * tokens, channels)`."""
        return ((products - expected).abs() <= tolerance * expected.abs()).all(dim=0)

    still, turned, *by_bit = states.cpu().flatten(1, 2)
    rotated = (~alike(turned, still)).nonzero().flatten().tolist()
    if not rotated:
        return None
    few = slice(None, None, max(1, len(still) // _ROWS))  # a few rows find the partners; all rows must agree
    plus, minus = (alike(turned[few, :, None], sign * still[few, None]) for sign in (1, -1))
    of_plus, of_minus = plus.int().argmax(dim=1), minus.int().argmax(dim=1)
    agrees = torch.where(minus.any(dim=1), alike(turned, -still[:, of_minus]), alike(turned, still[:, of_plus]))
    is_clear = ((plus.sum(dim=1) + minus.sum(dim=1) == 1) & agrees).tolist()
    turns = [alike(products, turned).tolist() for products in by_bit]
    stays = [alike(products, still).tolist() for products in by_bit]
    firsts: dict[int, int] = {}
    seconds: dict[int, int] = {}
    for i in rotated:
        if not is_clear[i]:
            raise ChangedAfterRotation(f"{name}: dimension {i} of the heads has no clear partner: {_CHANGED}")
        if not all(turn[i] or stay[i] for turn, stay in zip(turns, stays, strict=True)):
            raise ChangedAfterRotation(f"{name}: dimension {i} reads cos and sin of several frequencies, or {_CHANGED}")
        frequency = sum(turn[i] << bit for bit, turn in enumerate(turns))
        # a quarter turn of the pair (a, b) is (-b, a): the dimension that turned negative is the first
        first, second = (i, int(of_minus[i])) if minus[i].any() else (int(of_plus[i]), i)
        if firsts.setdefault(frequency, first) != first or seconds.setdefault(frequency, second) != second:
            raise UnsupportedModel(f"{name}: frequency {frequency} turns more than one pair of dimensions")
    order = sorted(firsts)
    if order != sorted(seconds) or order != list(range(len(order))) or 2 * len(order) != len(rotated):
        raise UnsupportedModel(f"{name}: the measured pairs of the rotation are inconsistent")
    return RotaryLayout(tuple(firsts[i] for i in order), tuple(seconds[i] for i in order))
