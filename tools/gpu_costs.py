"""What a text costs on a GPU by formula, in bfloat16: weights, cache, attention, and what a scheme and a loss add.

    python -m tools.gpu_costs
    python -m tools.gpu_costs --model recipes/assets/tiny-llama --lengths 1024 4096 --window 128

Without a folder it prints the table of docs/how-to/gpu.md, of the shapes of Llama 3.2 1B and Llama 3.1 8B. Nothing is
measured, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rope_patch.cli.options import run
from rope_patch.json_files import read_settings

NUMBER = 2  # bytes of a number in bfloat16
CHUNK = 256  # positions whose logits `chunked_loss` holds
UNITS = {"GiB": 2**30, "MiB": 2**20}
LENGTHS = (8192, 32768, 131072)
WINDOW = 4096


@dataclass(kw_only=True)
class Options:
    model: str | None = None  # folder of a Llama; only its config.json is read
    lengths: tuple[int, ...] = LENGTHS  # of the text, in tokens
    window: int = WINDOW  # near tokens, whose keys a scheme with regions rotates again


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama.

    Attributes:
        inner: width of the MLPs.
        tied: whether the head is the embedding.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int
    tied: bool

    @classmethod
    def from_folder(cls, folder: str) -> Shape:
        """The shape that a `config.json` gives."""
        config = read_settings(Path(folder) / "config.json")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            name=Path(folder).name,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            hidden=hidden,
            inner=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def in_layers(self) -> int:
        """Numbers in the matrices of all layers: projections of attention, and three of the MLP."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def weights(self) -> int:
        """Bytes of all matrices; norms are left out."""
        return NUMBER * (self.in_layers + (1 if self.tied else 2) * self.hidden * self.vocabulary)

    def cache(self, length: int) -> int:
        """Bytes of keys and values."""
        return 2 * NUMBER * self.layers * self.kv_heads * self.head_dim * length

    def attention_share(self, length: int) -> float:
        """Of the operations of a prompt, those that score pairs and weigh values: two products over half of all pairs,
        of two operations a number. The head, which reads one token, is left out.
        """
        pairs = 2 * self.layers * self.heads * self.head_dim * length**2
        return pairs / (pairs + 2 * self.in_layers * length)

    def again(self, length: int) -> int:
        """Bytes of queries and keys that a further region has rotated once more, in one layer of a prompt."""
        return NUMBER * (self.heads + self.kv_heads) * self.head_dim * length

    def turned(self, length: int, window: int) -> int:
        """Bytes that a decoded token moves beside those that it reads anyway: keys of the near window, read and written
        in each layer.
        """
        return self.cache(min(length, window))  # keys twice are as many bytes as keys and values

    def read(self, length: int) -> int:
        """Bytes that a decoded token reads: the matrices of the layers, the head and the cache."""
        return NUMBER * (self.in_layers + self.hidden * self.vocabulary) + self.cache(length)

    def logits(self, length: int) -> int:
        """Bytes of the logits of a training step and of their gradient, in float32."""
        return 2 * 4 * self.vocabulary * length


LLAMAS = (
    Shape("Llama 3.2 1B", 16, 32, 8, 64, 2048, 8192, 128256, tied=True),
    Shape("Llama 3.1 8B", 32, 32, 8, 128, 4096, 14336, 128256, tied=False),
)

HEADER = (
    "model, text",
    "weights",
    "cache",
    "attention's share of a prompt",
    "rotated again for a region, one layer",
    "bytes of a token beyond plain's",
    "logits, training",
    "in chunks",
)


def table(shapes: Sequence[Shape] = LLAMAS, lengths: Sequence[int] = LENGTHS, window: int = WINDOW) -> str:
    """The costs in Markdown."""
    lines = [HEADER, ("---", *["---:"] * (len(HEADER) - 1))]
    for shape in shapes:
        for length in lengths:
            more = shape.turned(length, window) / shape.read(length)
            bytes_ = (shape.again(length), shape.logits(length), shape.logits(min(length, CHUNK)))
            again, logits, chunk = map(size, bytes_)
            share = f"{shape.attention_share(length):.0%}"
            name = f"{shape.name}, {length // 1024}K" if length % 1024 == 0 else f"{shape.name}, {length}"
            cells = size(shape.weights), size(shape.cache(length)), share, again, f"{more:.1%}", logits, chunk
            lines.append((name, *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size(count: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    unit, step = next((pair for pair in UNITS.items() if count >= pair[1]), ("KiB", 2**10))
    return f"{count / step:.3g} {unit}"


def main(options: Options) -> None:
    """Print the table."""
    shapes = [Shape.from_folder(options.model)] if options.model else LLAMAS
    print(table(shapes, options.lengths, options.window))


if __name__ == "__main__":
    run(Options, main)
