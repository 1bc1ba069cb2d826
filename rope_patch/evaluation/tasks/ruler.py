"""Four tasks of RULER that need no download: a needle in noise, chains of variables, common words, frequent words.

Source: Hsieh et al. 2024, "RULER", arXiv 2404.06654, and github.com/NVIDIA/RULER at c3f5e3b, which has these texts. The
same seed draws the same prompts as RULER's code.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import string
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rope_patch.data.special_tokens import bare_ids, ids_to_continue
from rope_patch.errors import EvaluationError, require
from rope_patch.evaluation.tasks.task import Cell, Task, fingerprint, greedy

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

NEEDLE = "One of the special magic numbers for {key} is: {value}."
NEEDLE_BODY = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n{context}\n"
    "What is the special magic number for {key} mentioned in the provided text?"
)
NEEDLE_PREFIX = " The special magic number for {key} mentioned in the provided text is"

CHAIN_BODY = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
CHAIN_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the value "
    "{value}, they are: "
)

COMMON_BODY = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

FREQUENT_BODY = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"

NEW_TOKENS = {"niah_single_1": 128, "vt": 30, "cwe": 120, "fwe": 50}
"""The tasks, with the maximum number of tokens in an answer."""


@dataclass(frozen=True)
class Sample:
    """A question, the beginning of its answer, and the strings that the answer must contain."""

    body: str
    prefix: str
    answers: tuple[str, ...]

    def score(self, spoken: str) -> float:
        """The share of the answers that occur anywhere in the model's output: RULER's `string_match_all`."""
        return sum(answer.lower() in spoken.lower() for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Question:
    """A sample of a task, and the model's input, `(tokens,)`."""

    task: str
    sample: Sample
    tokens: torch.Tensor


@dataclass(frozen=True)
class Ruler(Task):
    """The four tasks of RULER. Lengths are in tokens of the checkpoint's tokenizer and include the prompt and the
    longest answer.

    Args:
        tasks: names from `NEW_TOKENS`; each task is a cell.
        samples: number of questions of each task at each length.
        chat: put the question into the tokenizer's chat template; its answer begins with the prefix.

    Raises:
        EvaluationError: the tokenizer has no chat template.
    """

    tokenizer: Any
    samples: int
    tasks: Sequence[str] = tuple(NEW_TOKENS)
    seed: int = 42
    chat: bool = False
    name = "ruler"
    what = "the answers to RULER's tasks"

    def __post_init__(self) -> None:
        if self.chat and not self.tokenizer.chat_template:
            raise EvaluationError("the tokenizer of this checkpoint has no chat template; measure it without --chat")

    def draw(self, task: str, length: int) -> list[Sample]:
        """Draw the samples of a task, the same for every scheme.

        Raises:
            EvaluationError: the length is too small for the shortest prompt.
            MissingPackage: the task needs wonderwords, which is not installed.
        """
        draw = _TASKS[task](_Draws(self, task, length))
        return [draw() for _ in range(self.samples)]

    def cells(self, length: int) -> list[Cell]:
        """One cell for each task."""
        cells = []
        for task in self.tasks:
            questions = [Question(task, sample, self.read(sample)) for sample in self.draw(task, length)]
            prompts = [question.tokens for question in questions]
            fields = {
                "task": task,
                "chat": self.chat,
                "seed": self.seed,
                "prompts": fingerprint(prompts),
                "prompt_tokens": statistics.fmean(map(len, prompts)),
            }
            cells.append(Cell([fields], questions, f", {task}"))
        return cells

    def size(self, item: Question) -> int:
        """The number of tokens in the prompt."""
        return len(item.tokens)

    def score(self, model: nn.Module, item: Question) -> float:
        """Decode greedily until all answers are found, and score the output."""

        def found(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            spoken = self.tokenizer.decode(input_ids[0, len(item.tokens) :], skip_special_tokens=True)
            return torch.tensor([item.sample.score(spoken) == 1], device=input_ids.device)

        (spoken,) = greedy(model, self.tokenizer, item.tokens[None], NEW_TOKENS[item.task], stopping_criteria=[found])
        return item.sample.score(spoken)

    def read(self, sample: Sample) -> torch.Tensor:
        """Tokenise a sample to the model's input, `(tokens,)`."""
        read = bare_ids if self.chat else ids_to_continue  # the template of a chat has its own special tokens
        return torch.tensor(read(self.tokenizer, self._text(sample)))

    def count(self, sample: Sample) -> int:
        """The number of tokens in the prompt, as RULER counts them, without special tokens of the tokenizer."""
        return len(bare_ids(self.tokenizer, self._text(sample)))

    def _text(self, sample: Sample) -> str:
        body = sample.body
        if self.chat:
            messages = [{"role": "user", "content": body}]
            body = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return body + sample.prefix


# --- the random draws of the tasks, in RULER's order ------------------------------------------------------------------

Draw = Callable[[], Sample]  # draws the next sample of a task


@dataclass
class _Draws:
    """Random generators of a task, and the search for the number of pieces that fit, which draws from the same
    generators.
    """

    ruler: Ruler
    task: str
    length: int

    def __post_init__(self) -> None:
        self.room = self.length - NEW_TOKENS[self.task]  # tokens of a prompt
        self.rng, self.numbers = random.Random(self.ruler.seed), np.random.RandomState(self.ruler.seed)

    def shuffled(self, items: Iterable[str]) -> list[str]:
        """The items in an order that depends only on the seed."""
        items = list(items)
        random.Random(self.ruler.seed).shuffle(items)
        return items

    def most(self, make: Callable[[int], Sample], step: int, upper: int = 0, room: int = 0, spent: int = 0) -> int:
        """Search for the largest number of pieces, from `step` to `upper`, whose prompt fits, by bisection.

        Args:
            upper: default a bound from the length of a short prompt within `room`, or within the whole length.
            room: the tokens that may be used; default the room of a prompt.
            spent: the tokens in front of the prompt.
        """
        upper = upper or max(int((room or self.length) / (self.ruler.count(make(step)) / step) * 3), 2 * step)
        falling = range(upper, step - 1, -1)  # bisected as RULER does, so that the draws are the same
        too_many = bisect_left(falling, spent - (room or self.room), key=lambda pieces: -self.ruler.count(make(pieces)))
        return max(upper - too_many, step)

    def fitting(self, make: Callable[[int], Sample], pieces: int, step: int, room: int = 0, least: int = 0) -> Sample:
        """Draw a sample of `pieces` pieces, and reduce it by `step` until it fits.

        Args:
            room: the tokens that may be used; default the room of a prompt.
            least: minimum number of pieces; default a step.

        Raises:
            EvaluationError: the shortest sample is too long.
        """
        room, least = room or self.room, least or step
        pieces = max(pieces, least)
        while (tokens := self.ruler.count(sample := make(pieces))) > room:
            if pieces <= least:
                what = "the shortest prompt" if room == self.room else "the shortest example"
                raise EvaluationError(
                    f"length {self.length}: {what} of task {self.task!r} needs {tokens} tokens of this tokenizer, but "
                    f"only {room} are allowed"
                )
            pieces = max(pieces - step, least)
        return sample


def _niah(draws: _Draws) -> Draw:
    """A number for a pair of an adjective and a noun, hidden before one of many lines of noise."""

    def make(lines: int) -> Sample:
        key = _word_pair(draws.rng)
        value = str(draws.rng.randint(10**6, 10**7 - 1))
        context = [NOISE] * lines
        context.insert(draws.rng.sample(range(lines), 1)[0], NEEDLE.format(key=key, value=value))
        draws.rng.sample(range(1), 1)  # RULER draws one of its keys here, even with a single key
        body = NEEDLE_BODY.format(context="\n".join(context), key=key)
        return Sample(body, NEEDLE_PREFIX.format(key=key), (value,))

    step = 25 if draws.length >= 4096 else 5
    return partial(draws.fitting, make, draws.most(make, step), step)


def _vt(draws: _Draws) -> Draw:
    """Five variables with one value, each assigned from the previous one; a short example precedes."""

    def make(lines: int, letters: int = 5, value: str | None = None) -> Sample:
        names = ["".join(draws.rng.choices(string.ascii_uppercase, k=letters)) for _ in range(5)]
        value = value or str(draws.numbers.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names))]
        context = [NOISE] * lines
        for place, (at, line) in enumerate(zip(sorted(draws.rng.sample(range(lines), 5)), chain, strict=True)):
            context.insert(at + place, line)
        body = CHAIN_BODY.format(context="\n".join(context), value=value)
        return Sample(body, CHAIN_PREFIX.format(value=value), tuple(names))

    old_value = "12345"
    short = partial(make, letters=3, value=old_value)
    example = draws.fitting(short, draws.most(short, 5, room=500), 5, 500)
    shown = f"{example.body}{example.prefix} {' '.join(example.answers)}\n"

    def asked(lines: int) -> Sample:
        sample, text = make(lines), shown
        for name in example.answers:
            text = text.replace(name, "".join(draws.rng.choices(string.ascii_uppercase, k=len(name))))
        text = text.replace(old_value, str(draws.numbers.randint(10000, 99999)))
        return Sample(f"{text}\n{sample.body}", sample.prefix, sample.answers)

    step = 10 if draws.length >= 4096 else 5
    spent = draws.ruler.count(Sample(shown, "", ()))
    return partial(draws.fitting, asked, draws.most(make, step, spent=spent), step)


def _cwe(draws: _Draws) -> Draw:
    """The ten most frequent words of a numbered list; a short list with its answer precedes."""
    words = draws.shuffled(sorted({word for kind in ("noun", "adjective", "verb") for word in _words(kind)}))

    def listed(number: int, often: int, seldom: int) -> tuple[str, tuple[str, ...]]:
        drawn = draws.rng.sample(words, number)
        common, others = drawn[:10], drawn[10:]
        return _numbered(draws.shuffled(common * often + others * seldom)), tuple(common)

    def make(number: int) -> Sample:
        small = draws.length < 4096
        example, top = listed(20, 3, 1) if small else listed(40, 10, 3)
        shown = f"{COMMON_BODY.format(context=example)}{COMMON_PREFIX} {_numbered(top)}"
        context, common = listed(number, 6, 1) if small else listed(number, 30, 3)
        return Sample(f"{shown}\n{COMMON_BODY.format(context=context)}", COMMON_PREFIX, common)

    many = min(4096, len(words))
    upper = min(max(int(draws.length // (draws.ruler.count(make(many)) / many)) * 2, 20), len(words))
    return partial(draws.fitting, make, draws.most(make, 10, upper), 10)


def _fwe(draws: _Draws) -> Draw:
    """The three most frequent words of random letters, with counts that fall with the square of their rank."""
    room, step = draws.room, draws.room // 32
    if room < 4 * 50:  # one word per 50 tokens: the dots, and three for the question
        raise EvaluationError(f"length {draws.length}: task 'fwe' needs at least {draws.length - room + 200} tokens")

    def ranked() -> list[str]:
        drawn: set[str] = set()
        while len(drawn) < room // 50:
            drawn.add("".join(draws.rng.choices(string.ascii_lowercase, k=6)))
        return ["...", *draws.shuffled(sorted(drawn))[1:]]

    def make(words: list[str], number: int) -> Sample:
        often = [int(number * rank**-2.0 / (math.pi**2 / 6)) for rank in range(1, len(words) + 1)]
        coded = draws.shuffled(word for word, count in zip(words, often, strict=True) for _ in range(count))
        return Sample(FREQUENT_BODY.format(context=" ".join(coded)), FREQUENT_PREFIX, tuple(words[1:4]))

    number, words = room // 6, ranked()
    while draws.ruler.count(make(words, number)) < room:
        number += step
    return lambda: draws.fitting(partial(make, ranked()), number - step, step, least=UNLIKE)


UNLIKE = 74  # from this many words on, the fourth occurs more often than the fifth: n (1/16 - 1/25) >= zeta(2)

_TASKS = {"niah_single_1": _niah, "vt": _vt, "cwe": _cwe, "fwe": _fwe}


def _numbered(words: Iterable[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))


@cache
def _words(kind: str) -> set[str]:
    require("wonderwords", "RULER's words (tasks niah_single_1 and cwe)", extra="ruler")
    import wonderwords

    return set(wonderwords.RandomWord().filter(include_categories=[kind]))


@cache
def _pairs() -> tuple[list[list[str]], list[int]]:
    """Sorted groups of adjectives that agree up to a hyphen, and the cumulative number of pairs with nouns."""
    ordered = sorted(_words("adjective"), key=lambda word: f"{word}-")
    alike = [list(group) for _, group in itertools.groupby(ordered, key=lambda word: word.partition("-")[0])]
    sizes = (len(_with_nouns(group) if len(group) > 1 else _words("noun")) for group in alike)
    return alike, list(itertools.accumulate(sizes))


def _with_nouns(adjectives: Iterable[str]) -> list[str]:
    return sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in _words("noun")})


def _word_pair(rng: random.Random) -> str:
    """Draw from all sorted pairs as `rng.choice` does, without the list of six million."""
    alike, ends = _pairs()
    place = rng.randrange(ends[-1])
    group = bisect_right(ends, place)
    return _with_nouns(alike[group])[place - ends[group]]
