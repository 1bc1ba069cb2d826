"""Read stacks that add learned absolute positions to their input: BERT, RoBERTa, ELECTRA, GPT-2, OPT and similar ones.

A table is an `nn.Embedding` named after positions. A run on four tokens measures the number of reserved rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rope_patch.errors import UnsupportedModel
from rope_patch.models.base import AbsoluteTable, Stack
from rope_patch.schemes.learned import Learned

_TOKENS = 4

_TABLE = re.compile(r"^(?!.*relative).*position|^wpe$")


def recognises(module: nn.Module) -> bool:
    """Whether a text model looks up learned positions itself, not only through an inner model."""
    return _has_table(module) and not any(_has_table(child) for child in module.modules() if child is not module)


def read(stack: PreTrainedModel) -> Stack:
    """Read a recognised stack; schemes change its table, not its attention.

    Raises:
        UnsupportedModel: there are several tables, positions also enter in another way, something of fixed size cannot
            grow with the table, or saving would not keep a longer one.
    """
    (name, embedding), *others = _tables(stack)
    if others:
        names = (name, *(other for other, _ in others))
        _refuse(stack, f"it has several position tables ({', '.join(names)})")
    if embedding.weight.is_meta:
        _refuse(stack, f"the weights of {name} are on the meta device; load them before patching")
    owners = [path for path, weight in stack.named_parameters(remove_duplicate=False) if weight is embedding.weight]
    if len(owners) > 1:
        _refuse(stack, f"{name} shares its weights ({', '.join(owners)})")
    kind = getattr(stack.config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        _refuse(stack, f"position_embedding_type={kind!r}; only 'absolute' adds positions to nothing but the input")
    if getattr(stack.config, "relative_attention", False):
        _refuse(stack, "its attention also has relative positions (relative_attention=True)")
    reserved, first = _measure(stack, name, embedding)
    buffers = _buffers(stack, embedding.num_embeddings, reserved)
    table = AbsoluteTable(stack, name, embedding, reserved, buffers, first)
    squared_norms = table.rows.double().square().sum(dim=-1)
    half = squared_norms.new_tensor(table.rows.shape[-1] / 2)  # sin^2 + cos^2 in every pair
    if torch.allclose(squared_norms, half, rtol=1e-2):
        _refuse(stack, f"the rows of {name} are computed sinusoids, not learned")
    if not any(holder is table.config for holder, _, _ in table.limits()):
        _refuse(stack, f"its config does not contain the number of rows of {name}, so a longer one could not be loaded")
    return Stack(stack, table.checkpoint, Learned(), absolute=table)


def _tables(module: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding) and _TABLE.search(name.rpartition(".")[2]):
            yield name, child


def _has_table(module: nn.Module) -> bool:
    reads_text = isinstance(module, PreTrainedModel) and module.main_input_name == "input_ids"
    return reads_text and next(_tables(module), None) is not None


def _buffers(stack: PreTrainedModel, rows: int, reserved: int) -> tuple[tuple[nn.Module, str], ...]:
    sizes, of_rows = (rows, rows - reserved), []
    for path, module in stack.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if buffer.ndim > 1 and buffer.shape[-1] == buffer.shape[-2] and buffer.shape[-1] in sizes:
                _refuse(
                    stack, f"{name} is a mask of {buffer.shape[-1]} x {buffer.shape[-1]} positions, which cannot grow"
                )
            if buffer.shape in [(1, size) for size in sizes] and not buffer.is_floating_point():
                if not torch.equal(buffer, lengthened(buffer, 0)):
                    _refuse(stack, f"{name} has a number per position, without a rule to extend it")
                of_rows.append((module, name.rpartition(".")[2]))
    return tuple(of_rows)


def lengthened(buffer: torch.Tensor, growth: int) -> torch.Tensor:
    """Extend a buffer of one number per row, `(1, rows)`: counts continue, zeros stay zeros."""
    places = torch.arange(buffer.shape[1] + growth).to(buffer)
    counts = buffer[0, -1] != buffer[0, 0]
    return (buffer[0, 0] + counts * places)[None]


def _measure(stack: PreTrainedModel, name: str, embedding: nn.Embedding) -> tuple[int, int | None]:
    """Measure the row that a text's first token reads, and `AbsoluteTable.first`. The next tokens must read the
    following rows.
    """
    try:
        middle = stack.config.vocab_size // 2  # special tokens such as pads, which may not count, are at the ends
        ids = torch.arange(middle, middle + _TOKENS, device=embedding.weight.device)[None]
        rows = _rows_read(stack, embedding, input_ids=ids)
    except Exception as error:  # models of other kinds may fail in any way
        raise UnsupportedModel(f"{type(stack).__name__} cannot read a text of four tokens: {error}") from error
    if rows is None:
        _refuse(stack, f"it does not use {name} when it reads a text")
    if rows != list(range(rows[0], rows[0] + _TOKENS)):
        _refuse(stack, f"a text of {_TOKENS} tokens reads the rows {rows} of {name}, which are not consecutive")
    return rows[0], _first_position(stack, embedding, ids, rows)


def _first_position(stack: PreTrainedModel, embedding: nn.Embedding, ids: torch.Tensor, rows: list[int]) -> int | None:
    """Measure `AbsoluteTable.first` of a stack that reads these `rows` for a text of `ids`, `(1, _TOKENS)`."""
    pad = getattr(stack.config, "pad_token_id", None)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, 0], mask[0, 0] = ids[0, 0] if pad is None else pad, 0
    every_other = torch.arange(0, 2 * _TOKENS, 2, device=ids.device)[None]  # tells positions from slots
    try:
        if _rows_read(stack, embedding, input_ids=padded, attention_mask=mask) != rows:
            return None
        found = _rows_read(stack, embedding, input_ids=ids, attention_mask=mask, position_ids=every_other)
    except Exception:  # for example because it takes no positions
        return None
    if found is None or found[0] > rows[0] or found != list(range(found[0], found[0] + 2 * _TOKENS, 2)):
        return None
    return rows[0] - found[0]


def _rows_read(stack: PreTrainedModel, embedding: nn.Embedding, **inputs: torch.Tensor) -> list[int] | None:
    """The rows of a table that a text of `_TOKENS` tokens reads; None if it reads no rows."""
    try:
        with torch.no_grad(), _Lookup(embedding.weight):
            stack(**inputs)
    except _FirstLookup as lookup:
        return cast(list[int], lookup.args[0][:_TOKENS])
    return None


class _FirstLookup(BaseException):  # not an Exception, so that no model catches it
    """Raised to end a forward at the first look-up in a table; its argument is the rows that are looked up."""


class _Lookup(TorchFunctionMode):
    """A mode that ends a forward at the first look-up in a table, and reports its rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (*args, *(kwargs or {}).values())
        if any(value is self.weight for value in arguments):
            for value in arguments:
                if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64):
                    raise _FirstLookup(value.flatten().tolist())
        return func(*args, **(kwargs or {}))


def _refuse(stack: PreTrainedModel, reason: str) -> NoReturn:
    raise UnsupportedModel(f"{type(stack).__name__}: {reason}")
