# /// script
# dependencies = ["rope-patch[cli]", "lm-eval"]
# ///
"""Tasks of EleutherAI's lm-evaluation-harness on a model under another position scheme.

    pip install lm-eval
    python recipes/lm_eval_patched.py --scheme yarn:factor=4 --max-length 1024 --text book.txt
    python recipes/lm_eval_patched.py --model DIR --scheme rerope:window=512+logn --tasks wikitext hellaswag
    python recipes/lm_eval_patched.py --model DIR --scheme yarn:factor=2 --tasks ruler --lengths 4096,8192 --limit 20

The harness takes a model that is loaded already, so a patched one needs nothing special. With `--text`, a local file is
the task, without a network: its perplexity over rolling windows of `--max-length` tokens.

`--lengths` are those of the group `ruler` (it needs wonderwords and nltk, too). Of its tasks, niah_single_1, ruler_vt,
ruler_cwe, ruler_fwe, niah_multikey_2 and niah_multikey_3 are made on the spot; the others download essays or questions.
A prompt of ruler_fwe is as long as the length without its answer, and the window has room for both.

How these windows differ from our protocol `disjoint`: the start-of-text (or else end-of-text) token precedes
the first window even where the tokenizer does not set it, so the first token of the text is scored too; each later
window begins with the last token of the one before, never with the start of text; and the last window is filled up
with earlier tokens, where ours is shorter. For a text that fills its windows exactly, with that token written in front
of it for `disjoint`, both give the same number.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.cli.options import Lengths, Names, in_one_process, run

MADE_HERE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
DOWNLOADED = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
DOWNLOADED += ("ruler_qa_squad", "ruler_qa_hotpot")
SAMPLES, ANSWER, VT_ANSWER = (
    500,
    128,
    30,
)  # of the harness: prompts per length, tokens of the longest answer, of ruler_vt


@dataclass(kw_only=True)
class Options:
    model: str | None = None  # checkpoint folder; default the small one that comes with the recipes
    scheme: str | None = None  # such as yarn:factor=4; default the checkpoint as it is
    tasks: Names = ()  # that the harness knows
    text: Path | None = None  # a text file as a task of its own
    lengths: Lengths = ()  # of the prompts of ruler, in tokens; default its own, 4096
    max_length: int | None = None  # window in tokens; default the model's own, or what the lengths need
    limit: int | None = None  # examples per task, of ruler per task and length; default all
    device: str = "auto"  # such as cpu or cuda:0; default an accelerator, else the CPU


def main(options: Options) -> None:
    """Let the harness evaluate the model under the scheme."""
    from rope_patch import patch
    from rope_patch.errors import EvaluationError, require
    from rope_patch.saving.loading import default_checkpoint, load_model, load_tokenizer, quiet_transformers

    in_one_process("lm_eval_patched.py")
    require("lm_eval", "this recipe")
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    if not options.tasks and options.text is None:
        raise EvaluationError("nothing to evaluate: give --tasks such as wikitext, or --text FILE")
    if options.text is not None and not options.text.is_file():
        raise EvaluationError(f"there is no text file {str(options.text)!r}")

    checkpoint = options.model or default_checkpoint()
    with quiet_transformers():
        tokenizer = load_tokenizer(checkpoint)
        evaluation: dict[str, Any] = ruler(options, checkpoint, tokenizer) or {"limit": options.limit}
        model = load_model(checkpoint, dtype="auto", device=options.device)
    tasks = [*options.tasks, *([rolling(options.text)] if options.text else [])]
    window = options.max_length or (max(options.lengths) + ANSWER if options.lengths else None)
    with patch(model, options.scheme) if options.scheme else nullcontext():
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, max_length=window, batch_size=1)
        try:
            outcome = lm_eval.simple_evaluate(model=wrapped, tasks=tasks, bootstrap_iters=0, **evaluation)
        except OSError as error:  # the hub's, and that of requests
            alone = f"; made without a download: --tasks {' '.join(MADE_HERE)}" if "metadata" in evaluation else ""
            raise EvaluationError(f"a task could not be loaded: {error}{alone}") from error

    print(f"{checkpoint} under {options.scheme or 'no scheme'}, windows of {wrapped.max_length} tokens")
    for task, metrics in outcome["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and value != -1:  # -1: a length that was not asked for
                print(f"{task:<16} {name.removesuffix(',none'):<18} {value:.4f}")
    if options.text is not None:
        show_nll(outcome["results"][options.text.stem], options.text, tokenizer)


def ruler(options: Options, checkpoint: str, tokenizer: Any) -> dict[str, Any]:
    """What the tasks of RULER are told; nothing where none is asked for."""
    from rope_patch.errors import EvaluationError, require

    wanted = set(options.tasks)
    if not wanted & {"ruler", *MADE_HERE, *DOWNLOADED}:
        if options.lengths:
            raise EvaluationError("lengths are those of the tasks of ruler; give --tasks ruler, or one of its tasks")
        return {}
    if others := sorted(wanted - {"ruler", *MADE_HERE, *DOWNLOADED}):
        raise EvaluationError(f"tasks {', '.join(others)}: give them a run of their own, without those of ruler")
    for package in ("wonderwords", "nltk"):
        require(package, "the group ruler")
    lengths = options.lengths or (4096,)
    check_room(wanted, min(lengths), tokenizer)
    settings: dict[str, Any] = {"metadata": {"max_seq_lengths": list(lengths), "tokenizer": checkpoint}}
    if options.limit:  # the harness would take the first alone, which are all of the shortest length
        first = [SAMPLES * length + number for length in range(len(lengths)) for number in range(options.limit)]
        settings["samples"] = dict.fromkeys((*MADE_HERE, *DOWNLOADED), first)
    return settings


def check_room(tasks: set[str], length: int, tokenizer: Any) -> None:
    """The harness never ends where the shortest prompt of a task has more tokens than it may."""
    from lm_eval.tasks.ruler import vt_utils

    from rope_patch.errors import EvaluationError
    from rope_patch.evaluation.tasks.ruler import Ruler

    for name in ("niah_single_1", "cwe", "fwe"):
        if tasks & {"ruler", name, f"ruler_{name}"}:
            Ruler(tokenizer, samples=1).draw(name, length)
    if tasks & {"ruler", "ruler_vt"}:
        drawn = [vt_utils.generate_input_output(lines, 1, 4, is_icl=lines == 5) for lines in (5, 10)]
        example, prompt = [len(tokenizer(f"{text} {names}")["input_ids"]) + VT_ANSWER for text, names in drawn]
        for tokens, allowed in ((example, 500), (example + prompt, length)):
            if tokens > allowed:
                raise EvaluationError(f"ruler_vt: its shortest prompt takes {tokens} tokens, and {allowed} are allowed")


def rolling(path: Path) -> dict[str, Any]:
    """A task of the harness, in the words of its YAML: the log-likelihood of one document."""
    return {
        "task": path.stem,
        "dataset_path": "text",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "sample_by": "document"},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    }


def show_nll(metrics: dict[str, Any], path: Path, tokenizer: Any) -> None:
    """In the unit of our own tables: the harness counts per byte or word, never per token."""
    text = path.read_text(encoding="utf-8")
    tokens = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    nll = math.log(metrics["byte_perplexity,none"]) * len(text.encode()) / tokens
    print(f"{path.stem:<16} {'nll per token':<18} {nll:.4f}   perplexity per token {math.exp(nll):.4f}")


if __name__ == "__main__":
    run(Options, main)
