"""RULER's tasks: the prompts are those of NVIDIA/RULER, the scores its own, the rows what was measured."""

from __future__ import annotations

import hashlib
import json
import random
import statistics

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.row import Row, Rows
from rope_patch.evaluation.run import run
from rope_patch.evaluation.tables import failed_within
from rope_patch.evaluation.tasks import ruler
from rope_patch.evaluation.tasks.ruler import NEW_TOKENS, Question, Ruler, Sample
from rope_patch.patching import find_handle
from rope_patch.saving.loading import default_checkpoint, load_tokenizer

from .conftest import TRAINING_LENGTH, byte_tokenizer

MADE_BY_RULER = {
    ("niah_single_1", 2048): "2b38a9ad92bedfb7",
    ("vt", 2048): "e16165a6aee4aa84",
    ("cwe", 2048): "eb3c26f48c5b6218",
    ("fwe", 2048): "e595c1bc8e6361d9",
    ("niah_single_1", 4096): "d89b46bb15f039fd",
    ("vt", 4096): "8f7eaa3882ede459",
    ("cwe", 4096): "ca13d3d2a1ace8bc",
    ("fwe", 4096): "13647aa9db7e4771",
}
"""Of prompts and answers that the scripts of NVIDIA/RULER at c3f5e3b wrote, with the tokenizer of the small checkpoint,
`--num_samples 3 --random_seed 42` and wonderwords 3.0.1."""


@pytest.mark.parametrize(("task", "length"), MADE_BY_RULER)
def test_the_prompts_are_those_that_ruler_makes(task, length):
    if task in ("niah_single_1", "cwe"):
        pytest.importorskip("wonderwords", minversion="3.0.1")
    samples = Ruler(load_tokenizer(default_checkpoint()), samples=3).draw(task, length)
    text = "\n".join(sample.body + sample.prefix + " ".join(sample.answers) for sample in samples)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == MADE_BY_RULER[task, length]


def test_the_needles_are_those_of_lm_eval_where_it_draws_alike(monkeypatch):
    """It searches for the size in another way, which costs other draws: here both are told the size."""
    needles = pytest.importorskip("lm_eval.tasks.ruler.prepare_niah")
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE

    monkeypatch.setattr(ruler._Draws, "most", lambda *_: 30)
    (sample,) = Ruler(load_tokenizer(default_checkpoint()), samples=1, seed=7).draw("niah_single_1", 4096)
    random.seed(7)
    kinds = {"type_needle_k": "words", "type_needle_v": "numbers", "num_needle_k": 1, "num_needle_v": 1}
    haystack = needles.get_haystack("repeat")
    text, answers, _ = needles.generate_input_output(30, haystack, type_haystack="repeat", template=TEMPLATE, **kinds)
    assert (sample.body, list(sample.answers)) == (text, answers)


WORDS = {
    "noun": {"e", "eyed-tree", "house", "tree"},
    "adjective": {"ad", "ad hoc", "b", "blue", "blue-eyed", "blues", "x-rated"},
}


@pytest.fixture
def few_words(monkeypatch):
    """A word list of our own: of the kinds that make pairs, and enough for the lists of common words."""
    kinds = {**WORDS, "verb": {f"{letter}{number}" for letter in "pqrst" for number in range(40)}}
    monkeypatch.setattr(ruler, "_words", kinds.__getitem__)
    ruler._pairs.cache_clear()
    yield kinds
    ruler._pairs.cache_clear()


def test_a_pair_of_words_is_drawn_as_from_the_sorted_list_of_all(few_words):
    pairs = sorted({f"{adjective}-{noun}" for adjective in WORDS["adjective"] for noun in WORDS["noun"]})
    assert len(pairs) < len(WORDS["adjective"]) * len(WORDS["noun"])  # two ways to spell one pair
    drawn = {ruler._word_pair(random.Random(seed)) for seed in range(300)}
    assert drawn == set(pairs)
    assert all(ruler._word_pair(random.Random(seed)) == random.Random(seed).choice(pairs) for seed in range(300))


@pytest.mark.parametrize("task", NEW_TOKENS)
@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("bos", [False, True])
def test_no_more_is_read_than_the_length(task, length, bos, few_words):
    asked = Ruler(byte_tokenizer(bos), samples=2, seed=1)
    if task == "vt" or (task, length) == ("cwe", 4096):  # bytes have no room for an example, or for 300 words
        what = "example" if task == "vt" else "prompt"
        with pytest.raises(EvaluationError, match=rf"length {length}: the shortest {what} of task '{task}' needs"):
            asked.draw(task, length)
        return
    samples = asked.draw(task, length)
    assert samples == Ruler(byte_tokenizer(bos), samples=2, seed=1).draw(task, length)
    assert samples[0] != samples[1]
    for sample in samples:
        text = sample.body + sample.prefix
        read = asked.read(sample)
        assert len(read) == len(text.encode()) + bos
        assert 0.7 * length < len(read) + NEW_TOKENS[task] - 1 <= length  # the last token is never read


def test_every_answer_is_in_the_context_as_often_as_it_must(few_words):
    asked = Ruler(byte_tokenizer(), samples=1)
    (sample,) = asked.draw("niah_single_1", 4096)
    assert sample.body.count(f" is: {sample.answers[0]}.") == 1
    (sample,) = asked.draw("cwe", 2048)
    _, _, listed = sample.body.rpartition("Memorize")
    assert all(listed.count(f". {word} ") + listed.count(f". {word}\n") == 6 for word in sample.answers)
    (sample,) = asked.draw("fwe", 4096)
    words = sample.body.split()
    counts = {word: words.count(word) for word in words if len(word) == 6 and word.islower() and word.isalpha()}
    assert sample.answers == tuple(sorted(sample.answers, key=counts.get, reverse=True))
    others = [count for word, count in counts.items() if word not in sample.answers]
    assert min(counts[word] for word in sample.answers) > max(others)


def test_a_chain_ends_in_its_number():
    (sample,) = Ruler(load_tokenizer(default_checkpoint()), samples=1).draw("vt", 1024)
    lines = sample.body.rpartition("Memorize and track")[2].splitlines()
    assigned = [line.removeprefix("VAR ").split(" = ") for line in lines if line.startswith("VAR ")]
    (name, value), *others = assigned
    assert sample.prefix.endswith(f"assigned the value {value}, they are: ")
    held = [name]
    for name, source in others:
        assert source == f"VAR {held[-1]} "
        held.append(name)
    assert sample.answers == tuple(held)


@pytest.mark.parametrize(
    ("spoken", "score"),
    [("", 0), (" b1, A7.", 1), ("a", 0), ("xa7y", 0.5), ("B1 b1", 0.5)],
)
def test_the_score_is_the_share_of_the_answers_that_occur(spoken, score):
    assert Sample("", "", ("a7", "B1")).score(spoken) == score


def test_a_length_without_room_is_named(few_words):
    with pytest.raises(EvaluationError, match="task 'fwe' needs at least 250 tokens"):
        Ruler(byte_tokenizer(), samples=1).draw("fwe", 249)
    with pytest.raises(EvaluationError, match="length 100: the shortest prompt of task 'niah_single_1'"):
        Ruler(byte_tokenizer(), samples=1).draw("niah_single_1", 100)


def test_a_chat_template_holds_the_question_and_the_answer_begins_with_the_prefix():
    tokenizer = byte_tokenizer(bos=True)
    with pytest.raises(EvaluationError, match="no chat template; measure it without --chat"):
        Ruler(tokenizer, samples=1, chat=True)
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    asked = Ruler(tokenizer, samples=1, chat=True)
    read = asked.read(Sample("What?", " It is", ("x",)))
    assert tokenizer.decode(read) == "[user]What?[assistant] It is"
    assert asked.count(Sample("What?", " It is", ("x",))) == len(read)


def test_decoding_stops_where_no_answer_is_missing(model):
    asked, steps = Ruler(byte_tokenizer(), samples=1), []
    (spoken,) = ruler.greedy(model, asked.tokenizer, asked.read(Sample("abc", "", ()))[None], 50)
    model.register_forward_hook(lambda *_: steps.append(1))
    for said, score, most in ((spoken[:2], 1, 8), ("never said", 0, 50)):
        steps.clear()
        sample = Sample("abc", "", (said,))
        assert asked.score(model, Question("fwe", sample, asked.read(sample))) == score
        assert len(steps) <= most
        assert score or len(steps) > 8


# --- measured --------------------------------------------------------------------------------------------------------

SCHEMES = ["plain", "window", "pi:target=auto"]


@pytest.fixture
def spoken(monkeypatch):
    """A model that under `window` answers each second prompt with its first word, and nothing else."""
    said = []

    def greedy(model, tokenizer, tokens, new_tokens, **_):
        handle = find_handle(model)
        said.append((str(handle.scheme) if handle else "plain", tokens.shape[1], new_tokens))
        prompt = next(p for p in asked if torch.equal(reader.read(p), tokens[0]))
        right = said[-1][0].startswith("window") and asked.index(prompt) % 2
        return [prompt.answers[0] if right else ""]

    reader = Ruler(byte_tokenizer(), samples=4)
    asked = reader.draw("fwe", 1024)
    monkeypatch.setattr(ruler, "greedy", greedy)
    return said


def test_rows_are_scores_under_their_scheme_with_errors_and_are_measured_once(model, spoken, tmp_path):
    results = Rows(tmp_path / "rows.jsonl")
    asked = Ruler(byte_tokenizer(), samples=4, tasks=["fwe"])
    rows = run(model, asked, SCHEMES, [1024], results, name="tiny")
    assert [row.line for row in rows] == SCHEMES
    assert [name.partition(":")[0] for name, _, _ in spoken] == [n for n in ("plain", "window", "pi") for _ in range(4)]
    assert {new for _, _, new in spoken} == {50}
    plain, window, _ = rows
    assert (plain.score, plain.error) == (0, 0)
    assert window.scores == [0, 1 / 3, 0, 1 / 3]
    assert window.score == pytest.approx(1 / 6)
    assert window.error == pytest.approx(statistics.stdev([0, 1 / 3, 0, 1 / 3]) / 2)
    assert (window.model, window.task, window.seed, window.chat) == ("tiny", "fwe", 42, False)
    spoken.clear()
    kept = Rows(tmp_path / "rows.jsonl")
    again = run(model, asked, SCHEMES, [1024], kept, name="tiny")
    assert [row.scores for row in again] == [row.scores for row in rows]
    assert not spoken
    more = Ruler(byte_tokenizer(), samples=3, tasks=["fwe"])  # other samples are another measurement
    assert len(run(model, more, ["plain"], [1024], results)[0].scores) == 3
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["line"] == "plain"
    assert find_handle(model) is None


def row(**changed):
    fields = {
        "line": "plain",
        "task": "vt",
        "length": 8,
        "training_length": TRAINING_LENGTH,
        "scores": [],
        "score": 0.0,
    }
    return Row(**fields | changed)


def test_a_task_that_no_scheme_can_do_within_the_training_length_means_nothing():
    rows = [
        row(score=0.9),  # at a shorter length; the longest within L counts
        row(length=16, score=0.02),
        row(length=16, score=0.05, line="window"),
        row(length=64, score=0.5),
        row(task="cwe", length=16, score=0.0),
        row(task="cwe", length=16, score=0.1, line="window"),
    ]
    assert failed_within(rows) == {"vt": 0.05}
    assert failed_within([row(length=64)]) == {}


def test_an_encoder_with_a_decoder_is_refused():
    model = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(EvaluationError, match="is an encoder with a decoder"):
        run(model, Ruler(byte_tokenizer(), samples=1), ["plain"], [1024])
