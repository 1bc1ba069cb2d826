"""How much memory a fine-tuning step will take, asked before it is started.

Weights, gradients and optimiser are counted. Activations are measured, for no table of layers knows what a family or
a patched attention saves: the stack runs forward at three short lengths, every storage that autograd would keep is
counted once, and

    bytes(length) = constant + rows (per_token length + per_pair length^2),    per_pair >= 0

goes through the three points. Nothing is kept meanwhile, so that asking takes no more memory than inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_layers import GradientCheckpointingLayer

from rope_patch.attention.engine import SMALL
from rope_patch.errors import EvaluationError
from rope_patch.models.head import find_language_model, head_alone
from rope_patch.training.cross_entropy import LanguageModelLoss

SHORT_PROBES = (32, 64, 128)
LONG_PROBES = (576, 768, 1024)
"""Where activations are measured for texts with more pairs than `SMALL`, on which patched attention works in tiles."""

_CGROUP = Path("/sys/fs/cgroup")
_CHECKPOINTED = "gradient_checkpointing"  # the switch of every module of Transformers that can


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training step on one device.

    Attributes:
        weights: parameters and buffers.
        gradients: of what is trained.
        optimizer: its states.
        activations: what the stack saves for the backward.
        loss: what the head needs beside that, at its largest chunk.
        length, rows, checkpointing: what the step was said to be.
        everything_trained: whether no parameter is frozen.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    length: int
    rows: int
    checkpointing: bool
    everything_trained: bool

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.beyond_weights

    @property
    def beyond_weights(self) -> int:
        """What has still to be found once the model is loaded."""
        return self.gradients + self.optimizer + self.activations + self.loss

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimiser": self.optimizer,
            "activations": self.activations,
            "loss": self.loss,
        }
        return ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items()) + f": {_gigabytes(self.total)}"


def estimate(
    loss_module: LanguageModelLoss,
    length: int,
    rows: int,
    *,
    checkpointing: bool,
    optimizer_states: int = 2,
    dtype: torch.dtype | None = None,
    shards: int = 1,
    probes: Sequence[int] | None = None,
) -> MemoryEstimate:
    """What a step will take, for a model that is loaded but not yet wrapped or sharded.

    Args:
        loss_module: the model with its loss; it is left exactly as it was.
        length: tokens of a sequence.
        rows: sequences that are on the device at once.
        checkpointing: whether the step will use gradient checkpointing, whatever the model is set to now.
        optimizer_states: tensors that the optimiser keeps per parameter, of its dtype: 2 for Adam.
        dtype: of the autocast that the step will run under; None for none.
        shards: processes that share weights, gradients and optimiser, as under `fully_shard`.
        probes: the three lengths to measure at; by default short ones, on the same side as `length` of where patched
            attention begins to work in tiles. A scheme that does something else beyond its window needs longer ones
            to be seen doing it.

    Raises:
        EvaluationError: a size that is not positive, or probes that are not three different lengths.
    """
    probes = probes or (SHORT_PROBES if length**2 <= SMALL else LONG_PROBES)
    if min(length, rows, shards, *probes) < 1:
        raise EvaluationError(f"length {length}, rows {rows}, shards {shards}, probes {probes}: all are at least 1")
    if len(set(probes)) != 3:
        raise EvaluationError(f"probes {tuple(probes)}: a parabola takes three different lengths")
    parameters = list(loss_module.parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    weights = sum(parameter.nbytes for parameter in parameters) + sum(buffer.nbytes for buffer in loss_module.buffers())
    with _as_in_training(loss_module), _autocast(loss_module, dtype):
        saved = {probe: _saved_bytes(loss_module, probe, checkpointing) for probe in probes}
        constant, per_token, per_pair = _parabola(saved)
        loss = _loss_bytes(loss_module, length * rows)
    return MemoryEstimate(
        weights=-(-weights // shards),
        gradients=-(-trained // shards),
        optimizer=-(-optimizer_states * trained // shards),
        activations=round(constant + rows * (per_token * length + per_pair * length**2)),
        loss=loss,
        length=length,
        rows=rows,
        checkpointing=checkpointing,
        everything_trained=all(parameter.requires_grad for parameter in parameters),
    )


def available(device: torch.device | str) -> int:
    """Bytes that this process can still take on a device, within the limit of its control group."""
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = psutil.virtual_memory().available
    limit = _cgroup_room(_CGROUP)
    return free if limit is None else min(free, limit)


def require_room(estimate: MemoryEstimate, available: int) -> None:
    """Refuse a step that will not fit beside the weights, which are loaded already.

    Raises:
        EvaluationError: what is needed, what there is, and what helps.
    """
    if estimate.beyond_weights <= available:
        return
    helps = ["a shorter length"]
    if estimate.everything_trained:
        helps.insert(0, "LoRA instead of training everything")
    if estimate.rows > 1:
        helps.insert(0, "fewer rows per micro-batch")
    if not estimate.checkpointing:
        helps.insert(0, "gradient checkpointing")
    raise EvaluationError(
        f"a step of {estimate.rows} x {estimate.length} tokens needs {_gigabytes(estimate.beyond_weights)} beside the "
        f"weights, and there are {_gigabytes(available)} ({estimate}); what helps: {', '.join(helps)}"
    )


@contextmanager
def _as_in_training(module: nn.Module) -> Iterator[None]:
    """Dropout on and checkpointing off, with all modes and random states as before afterwards."""
    modes = {each: each.training for each in module.modules()}
    checkpointed = [each for each in module.modules() if getattr(each, _CHECKPOINTED, False)]
    cuda = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        try:
            for each in modes:
                each.training = True
            for each in checkpointed:
                setattr(each, _CHECKPOINTED, False)
            yield
        finally:
            for each, mode in modes.items():
                each.training = mode
            for each in checkpointed:
                setattr(each, _CHECKPOINTED, True)


def _autocast(module: nn.Module, dtype: torch.dtype | None) -> torch.autocast:
    kind = next(module.parameters()).device.type
    return torch.autocast(kind, dtype=dtype, enabled=True) if dtype else torch.autocast(kind, enabled=False)


def _saved_bytes(module: LanguageModelLoss, length: int, checkpointing: bool) -> int:
    """What the stack saves for the backward of one sequence, by running it forward.

    Under gradient checkpointing that is the input of every layer, what is saved outside of layers, and one layer,
    the one that is computed again.
    """
    tally = _Tally(module)
    with tally.watching(), torch.enable_grad():
        _run_stack(module, length)
    if not checkpointing:
        return sum(tally.saved.values())
    outside = {key: size for key, size in tally.saved.items() if tally.layer_of[key] is None}
    layers = [sum(size for key, size in tally.saved.items() if tally.layer_of[key] is layer) for layer in tally.layers]
    return sum({**outside, **tally.inputs}.values()) + max(layers, default=0)


def _run_stack(module: LanguageModelLoss, length: int) -> Any:
    stack = find_language_model(module.model).base_model
    tokens = torch.zeros(1, length, dtype=torch.long, device=next(stack.parameters()).device)
    return stack(input_ids=tokens, use_cache=False, return_dict=True)


class _Tally:
    """Distinct storages that autograd saves in a forward, with the layer that saved each first.

    Attributes:
        layers: the modules that Transformers checkpoints.
        saved: bytes by storage.
        layer_of: the layer by storage; None outside of layers.
        inputs: bytes of what layers are given, by storage.
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
        self.saved: dict[int, int] = {}
        self.layer_of: dict[int, nn.Module | None] = {}
        self.inputs: dict[int, int] = {}
        self._current: nn.Module | None = None
        # a weak reference keeps the address of a storage from being given to another one, without its memory
        self._references: list[StorageWeakRef] = []
        self._permanent = {self._key(each) for each in (*module.parameters(), *module.buffers())}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what happens within."""
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _never_unpacked))
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(self._leave).remove)
            yield

    def _key(self, tensor: torch.Tensor) -> int:
        self._references.append(StorageWeakRef(tensor.untyped_storage()))
        return self._references[-1].cdata

    def _save(self, tensor: torch.Tensor) -> None:
        key = self._key(tensor)
        if key not in self._permanent and key not in self.saved:
            self.saved[key] = tensor.untyped_storage().nbytes()
            self.layer_of[key] = self._current

    def _enter(self, layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._current = layer
        for value in (*positional, *named.values()):
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, torch.Tensor) and (key := self._key(each)) not in self._permanent:
                    self.inputs[key] = each.untyped_storage().nbytes()

    def _leave(self, *_: Any) -> None:
        self._current = None


def _never_unpacked(_: None) -> torch.Tensor:
    raise AssertionError("this forward has no backward")


def _parabola(points: dict[int, int]) -> tuple[float, float, float]:
    """Constant, linear and quadratic term through three points; a line, by least squares, where it bends down."""
    (x0, y0), (x1, y1), (x2, y2) = sorted(points.items())
    first, second = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    quadratic = (second - first) / (x2 - x0)
    if quadratic >= 0:
        linear = first - quadratic * (x0 + x1)
        return y0 - linear * x0 - quadratic * x0**2, linear, quadratic
    mean_x, mean_y = (x0 + x1 + x2) / 3, (y0 + y1 + y2) / 3
    spread = sum((x - mean_x) ** 2 for x in points)
    linear = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / spread
    return mean_y - linear * mean_x, linear, 0.0


def _loss_bytes(module: LanguageModelLoss, tokens: int) -> int:
    """What `LanguageModelLoss` holds at its largest, beyond the gradients that it hands out.

    The gradient of the states; and for one chunk its logits, in the head's dtype and in float32, with three more of
    their size that cross-entropy makes (the logarithm of softmax and two gradients), and the chunk's gradient of the
    head, beside its sum where that is wider than the gradient that it becomes.
    """
    language_model = find_language_model(module.model)
    with torch.no_grad():
        outputs = _run_stack(module, 1)
        with head_alone(language_model, type(outputs)) as head:
            logits = head(outputs.last_hidden_state)
            trained = [p for p in language_model.parameters() if p.requires_grad]
    narrow = 0 if logits.dtype == torch.float32 else 2 * logits.element_size()
    chunk = min(module.rows_per_chunk, tokens) * logits.shape[-1] * (4 * 4 + narrow)
    wider = sum(4 * parameter.numel() for parameter in trained if parameter.element_size() < 4)
    return tokens * outputs.last_hidden_state.nbytes + chunk + sum(p.nbytes for p in trained) + wider


def _cgroup_room(folder: Path) -> int | None:
    """What the control group leaves, its page cache counted as free; None where there is no limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - int(used) + int(statistics.get("inactive_file", 0)))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
