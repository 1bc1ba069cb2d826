"""Measure loss (the logarithm of perplexity) against context length: a table, JSON lines and a chart.

    rope-patch perplexity --scheme yarn:target=auto --lengths 256,512,1024 --documents 4
    rope-patch perplexity --protocol sliding --lengths 256,512 --documents 1 --tokens-per-document 1024
    rope-patch perplexity --protocol repeat --lengths 2x --scheme rerope:window=128+logn
    python recipes/perplexity.py recipes/configs/perplexity_tiny.yaml
    torchrun --nproc-per-node 2 recipes/perplexity.py recipes/configs/perplexity_tiny.yaml
    rope-patch perplexity --context-parallel 2 --lengths 65536

The table also has the plain checkpoint (plain), the plain checkpoint on truncated text, the last L tokens only (cut),
and a sliding window of L tokens (window); --no-references leaves them out. Results are saved as you go: run the same
command again to resume. Several processes divide the windows and write the same rows as one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rope_patch.cli.options import (
    Count,
    Folder,
    Lengths,
    Measured,
    Name,
    OptionalFolder,
    Specs,
    is_main,
    run,
    say,
)
from rope_patch.cli.report import report

if TYPE_CHECKING:
    from rope_patch.evaluation.verdict import Verdict


@dataclass(kw_only=True)
class Options(Measured):
    lengths: Lengths  # context lengths to measure, ascending: tokens, or multiples of L such as 4x
    schemes: Specs = ()  # scheme to measure, a line of the table; target=auto takes each length in turn
    references: bool = True  # include the lines plain, cut and window (and near under repeat)
    protocol: Name = "auto"  # last, far, repeat, longppl, by_position, span_corruption, sliding, disjoint, yarn_...
    targets: Count = None  # number of scored tokens in each window (default: L, at most 4096)
    evaluator: OptionalFolder = None  # under longppl, the checkpoint that finds key tokens
    short_context: Count = None  # under longppl, tokens of its short contexts (default: 4096)
    stride: Count = None  # tokens between two windows of sliding, yarn_compat (256) and longppl (1024)
    tokens_per_document: Count = None  # tokens of each document, if whole documents are scored (default: all)
    documents: Count = None  # number of documents, drawn at random (default: all)
    windows_per_document: Count = None  # windows scored in each document (default: enough for 16 in all)
    context_parallel: int = 1  # processes that share each context; started for you, unless by a launcher
    output: Folder = "runs/perplexity"  # folder for perplexity.jsonl and perplexity.png


def main(options: Options) -> Verdict | None:
    """Measure every scheme at every length."""
    from rope_patch.data.corpora import load_text, name_of_text
    from rope_patch.errors import counted
    from rope_patch.evaluation.measured_model import pop_scheme
    from rope_patch.evaluation.row import Rows
    from rope_patch.evaluation.run import run as run_task
    from rope_patch.evaluation.scheme_specs import with_references
    from rope_patch.evaluation.tables import shortfalls
    from rope_patch.evaluation.tasks.perplexity import Perplexity
    from rope_patch.evaluation.verdict import of_losses
    from rope_patch.saving.loading import default_checkpoint, load_model, load_tokenizer, quiet_transformers

    # what can be wrong is found before anything slow
    task = Perplexity(
        protocol=options.protocol,
        targets=options.targets,
        stride=options.stride,
        evaluator=options.evaluator,
        short_context=options.short_context,
        tokens_per_document=options.tokens_per_document,
        documents=options.documents,
        windows_per_document=options.windows_per_document,
        seed=options.seed,
        text=name_of_text(options.text, options.dataset, options.split),
    )
    task.check(options.lengths)
    schemes = with_references(options.schemes, task.references(options.references))
    results = Rows(Path(options.output) / "perplexity.jsonl")

    checkpoint = options.model or default_checkpoint()
    with quiet_transformers():
        model = load_model(checkpoint, dtype=options.dtype, device=options.device, attention=options.attention)
        tokenizer = load_tokenizer(checkpoint)
    trained = pop_scheme(model, say)
    corpus = load_text(options.text, options.dataset, split=options.split, column=options.column)
    lengths = ", ".join(map(str, options.lengths))
    say(f"measuring {counted(len(schemes), 'scheme')} at {lengths} tokens of {counted(len(corpus), 'document')}")
    task = replace(task, tokenizer=tokenizer, corpus=corpus)
    how = {"name": options.model or "tiny-llama", "trained": trained, "sharing": options.context_parallel}
    rows = run_task(model, task, schemes, options.lengths, results, **how)

    if not is_main():
        return None
    for note in shortfalls(rows[-1]):
        say(note)
    return report(rows, options, results.path, of_losses(rows))


if __name__ == "__main__":
    run(Options, main)
