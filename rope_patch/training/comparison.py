"""The description of a comparison: one small model, trained from scratch once per position encoding and seed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rope_patch.errors import CorpusError, EvaluationError
from rope_patch.evaluation.corpora import load_corpus
from rope_patch.evaluation.description import check_at_least, check_types, read_yaml
from rope_patch.evaluation.texts import Selection, select_windows
from rope_patch.schemes import Scheme, get_scheme
from rope_patch.training.loop import Schedule

BYTES = 256
"""The vocabulary: one token per byte and nothing else."""


@dataclass(frozen=True)
class Comparison:
    """What to train, on what, how it is measured, and where the results go. The fields are the keys of the YAML.

    Attributes:
        encodings: schemes as strings, such as `rope` or `alibi`.
        seeds: each gives other weights and other batches; for the same seed both are the same under every encoding.
        output: folder of the results.
        train_text: a text file or a folder of them; default the standard library without its held-out modules.
        held_out_text: likewise; default the held-out modules. Either both are given or neither.
        context: L, the training length in bytes.
        multiples: evaluation lengths in multiples of L, ascending, the first one 1.
        targets: T, scored bytes per window, the same at every length.
        documents: how many held-out documents are scored; default all that are long enough.
        windows_per_document: how many places in each.
        hidden_size, intermediate_size, layers, heads: of the model.
        batch_size, steps, warmup_steps, decay_steps, learning_rate, weight_decay, save_every_seconds, evaluate_every:
            see `Schedule`.
        device: a name that torch knows.
        threads: that torch computes with on the CPU; null leaves it to torch. Models as small as these gain little
            from a second one, and lose much where other processes want the cores.
        cost_repetitions: how often a training step is timed for the table of costs.
    """

    encodings: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    output: str = "runs/compare"
    train_text: str | None = None
    held_out_text: str | None = None
    context: int = 128
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    targets: int = 64
    documents: int | None = None
    windows_per_document: int = 4
    hidden_size: int = 64
    intermediate_size: int = 160
    layers: int = 4
    heads: int = 4
    batch_size: int = 16
    steps: int = 1000
    warmup_steps: int = 50
    decay_steps: int = 250
    learning_rate: float = 0.004
    weight_decay: float = 0.1
    save_every_seconds: float = 60.0
    evaluate_every: int = 100
    device: str = "cpu"
    threads: int | None = 1
    cost_repetitions: int = 15

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("context", "targets", "documents", "windows_per_document", "hidden_size", "intermediate_size")
        check_at_least(self, 1, *counts, "layers", "heads", "batch_size", "steps", "warmup_steps", "decay_steps")
        check_at_least(self, 1, "evaluate_every", "cost_repetitions", "threads")
        check_at_least(self, 0, "weight_decay", "save_every_seconds")
        if not 0 < self.learning_rate < float("inf"):
            raise EvaluationError(f"learning_rate={self.learning_rate} is not allowed; it must be a number above 0")
        self._check_list("encodings", "a scheme, such as 'rope'")
        self._check_list("seeds", "a whole number")
        self._check_list("multiples", "1")
        if self.multiples[0] != 1 or any(longer <= shorter for shorter, longer in pairwise(self.multiples)):
            raise EvaluationError(f"multiples={list(self.multiples)} is not allowed; they begin with 1 and ascend")
        if self.targets > self.context:
            raise EvaluationError(
                f"targets={self.targets} is more than context={self.context}; every length scores the same, so at most "
                f"{self.context} are allowed"
            )
        if self.hidden_size % (2 * self.heads):
            raise EvaluationError(
                f"hidden_size={self.hidden_size} is not allowed; it must be a multiple of 2 * heads = {2 * self.heads}"
            )
        if (self.train_text is None) != (self.held_out_text is None):
            raise EvaluationError("train_text and held_out_text: give both or neither")

    def _check_list(self, name: str, example: str) -> None:
        values = getattr(self, name)
        if not values:
            raise EvaluationError(f"{name} is empty; give at least one, such as {example}")
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise EvaluationError(f"{name}: {twice[0]!r} is there twice")

    @classmethod
    def from_yaml(cls, path: str | Path) -> Comparison:
        """Read a description.

        Raises:
            EvaluationError: the file is no YAML mapping, or a key or a value is wrong.
            OSError: it cannot be read.
        """
        return read_yaml(cls, path)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Evaluation lengths in tokens."""
        return tuple(multiple * self.context for multiple in self.multiples)

    def schemes(self) -> dict[str, Scheme]:
        """The scheme of every encoding.

        Raises:
            UnknownScheme, InvalidField, SlotConflict: a string does not name a scheme.
        """
        return {spec: get_scheme(spec) for spec in self.encodings}

    def only(self, specs: Sequence[str]) -> Comparison:
        """The same comparison with a part of its encodings.

        Raises:
            EvaluationError: one of them is not part of it.
        """
        for spec in specs:
            if spec not in self.encodings:
                raise EvaluationError(f"{spec!r} is not among the encodings: {', '.join(self.encodings)}")
        return dataclasses.replace(self, encodings=tuple(spec for spec in self.encodings if spec in specs))

    def schedule(self, output: Path, seed: int) -> Schedule:
        """What the training loop is told of one run."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(Schedule) if field.name in _OWN}
        return Schedule(output=str(output), seed=seed, **shared)

    def build(self, seed: int) -> LlamaForCausalLM:
        """The model before it is trained: for one seed the same weights whatever is patched onto it."""
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=BYTES,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return LlamaForCausalLM(config).to(self.device)


_OWN = {field.name for field in dataclasses.fields(Comparison)} - {"output"}

_MATTERS = (
    *("context", "multiples", "targets", "documents", "windows_per_document"),
    *("hidden_size", "intermediate_size", "layers", "heads"),
    *("batch_size", "steps", "warmup_steps", "decay_steps", "learning_rate", "weight_decay"),
)
"""The settings that two rows must share to stand in one table."""


@dataclass(frozen=True)
class Data:
    """The texts of a comparison as bytes, `uint8`.

    Attributes:
        stream: all training documents in a row, each closed by a zero byte, `(bytes,)`.
        held_out: likewise the held-out ones.
        selection: the windows that are scored.
    """

    stream: torch.Tensor
    held_out: torch.Tensor
    selection: Selection

    @classmethod
    def of(cls, comparison: Comparison) -> Data:
        """Read the texts.

        Raises:
            CorpusError: there is no text.
            EvaluationError: a text is too short for what is asked of it.
        """
        corpora = [
            load_corpus(_existing(text) if text else "stdlib", split=None if text else split)
            for text, split in ((comparison.train_text, "train"), (comparison.held_out_text, "held_out"))
        ]
        streams = [_stream(corpus["text"]) for corpus in corpora]
        for name, stream in zip(("training", "held-out"), streams, strict=True):
            if len(stream) < comparison.context + 2:
                raise EvaluationError(
                    f"the {name} text has {len(stream)} bytes; a context of {comparison.context} needs "
                    f"{comparison.context + 2}"
                )
        selection = select_windows(
            corpora[1],
            Bytes(),
            longest=comparison.lengths[-1],
            targets=comparison.targets,
            documents=comparison.documents,
            windows_per_document=comparison.windows_per_document,
        )
        return cls(streams[0], streams[1], selection)

    def settings(self, comparison: Comparison) -> dict[str, Any]:
        """Everything that rows must share to stand in one table, as plain JSON types."""
        chosen = {name: getattr(comparison, name) for name in _MATTERS}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
        digest = hashlib.sha256(self.stream.numpy().tobytes()).hexdigest()[:16]
        return {**plain, "train_text": digest, "held_out_text": self.selection.fingerprint}


class Bytes:
    """A tokenizer, as far as `select_windows` needs one: every byte of UTF-8 is a token."""

    bos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """The tokens of a text."""
        return {"input_ids": list(text.encode())}


def _stream(texts: Sequence[str]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(text.encode() + b"\0" for text in texts)), dtype=torch.uint8)


def _existing(text: str) -> str:
    if not Path(text).exists():
        raise CorpusError(f"there is no text file or folder {text!r}")
    return text
