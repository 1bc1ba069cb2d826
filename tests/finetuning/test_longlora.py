"""The tool of LongLoRA's table: the same tokens for every method, and a table that is what its rows are."""

from __future__ import annotations

import json
import math

import pytest

from rope_patch.errors import EvaluationError
from tests.evaluation.conftest import TRAINING_LENGTH, byte_tokenizer
from tests.recipes import run_script
from tools import longlora

METHODS = ["lora", "lora_norms", "lora_embeddings", "lora_norms_embeddings", "full"]
LENGTHS = [TRAINING_LENGTH, 2 * TRAINING_LENGTH]


def test_a_table_of_every_method_and_seed(given, tmp_path, capsys):
    words = ["--model", given / "model", "--text", given / "train.jsonl", "--eval-text", given / "held_out.txt"]
    words += ["--length", LENGTHS[1], "--lengths", *LENGTHS, "--steps", 2, "--warmup-steps", 1, "--device", "cpu"]
    words += ["--learning-rates", 1e-2, "--output", tmp_path]
    assert run_script(longlora, [*words, "--seeds", 0]) == 0
    first, _ = (tmp_path / "longlora.jsonl").read_text(), capsys.readouterr()
    assert run_script(longlora, [*words, "--seeds", 0, 1]) == 0
    found = capsys.readouterr()
    assert "full, 0.01, seed 0: done before" in found.err
    assert (tmp_path / "longlora.jsonl").read_text().startswith(first)

    points = [json.loads(line) for line in (tmp_path / "longlora.jsonl").read_text().splitlines()]
    cells = {(point["line"], point["length"]): point["nll"] for point in points}
    trained = {f"{method}, 0.01, seed {seed}" for method in METHODS for seed in (0, 1)}
    assert {line for line, _ in cells} == {"plain", "window", "pi:target=auto"} | trained
    assert len(points) == len(cells) == 13 * len(LENGTHS)
    assert len({cells[line, LENGTHS[1]] for line in trained}) == len(trained)  # each was trained in its own way

    for method in METHODS:
        (row,) = [line.split() for line in found.out.splitlines() if line.startswith(f"{method}, ")]
        one, other = (cells[f"{method}, 0.01, seed {seed}", LENGTHS[1]] for seed in (0, 1))
        full = [cells[f"full, 0.01, seed {seed}", LENGTHS[1]] for seed in (0, 1)]
        assert float(row[5]) == pytest.approx((one + other) / 2, abs=6e-4)
        assert float(row[7]) == pytest.approx(abs(one - other) / math.sqrt(2), abs=6e-4)
        assert len(row) == (8 if method == "full" else 11)
        if method != "full":
            assert float(row[8]) == pytest.approx((one + other - sum(full)) / 2, abs=1e-3)
    assert (tmp_path / "longlora.png").is_file()

    assert run_script(longlora, [*words, "--seeds", 0, "--rank", 4]) == 2
    assert "holds other runs" in capsys.readouterr().err


def test_rows_are_the_documents_in_an_order_of_the_seed():
    tokenizer = byte_tokenizer()
    texts = ["one", "two", "three", "four", "five"]

    def text_of(seed):
        rows = longlora.joined(list(texts), tokenizer, 7, 3, seed)
        assert all(len(row["input_ids"]) == 7 and row["labels"] == row["input_ids"] for row in rows)
        return tokenizer.decode([token for row in rows for token in row["input_ids"]])

    orders = {text_of(seed) for seed in range(6)}
    assert len(orders) > 1
    assert all(set(order.split("\n\n")[:-1]) <= set(texts) for order in orders)
    assert text_of(3) == text_of(3)
    with pytest.raises(EvaluationError, match=r"9 rows of 7 tokens are asked for, the text fills 3"):
        longlora.joined(list(texts), tokenizer, 7, 9, 0)
