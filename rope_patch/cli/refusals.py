"""Errors for a command line that cannot be parsed: each shows the line to write. The module loads without torch and the
parser.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise

from rope_patch.errors import EvaluationError, did_you_mean, nearest

_ALIKE = tuple(
    words.split()
    for words in (
        "model checkpoint m model-path model-name model-id model-name-or-path pretrained path",
        "scheme schemes s method encoding rope-scaling rope-parameters rope-type patch",
        "output o out outfile out-dir output-dir output-path save save-dir save-path",
        "text t f file data data-file train-file input input-file text-file corpus",
        "lengths target length max-length context context-length ctx ctx-size n-ctx seq-len seq-length max-seq-len "
        "max-seq-length max-model-len max-position-embeddings block-size",
        "documents samples trials n limit num-samples max-samples num-examples",
        "steps max-steps num-steps iters iterations epochs num-train-epochs",
        "learning-rate lr",
        "rank r lora-r lora-rank",
        "alpha lora-alpha",
        "micro-batch-size per-device-train-batch-size",
        "attention attn attn-implementation attn-impl",
        "dtype d torch-dtype precision",
        "device device-map gpu",
        "tasks task k",
        "port p",
    )
)
"""Options with the same meaning, in this command line or in other programs."""

_FIELDS = ("factor", "target", "window", "group-size", "base", "beta-fast", "beta-slow", "local-window", "variant")
"""Fields of schemes that users type as options."""

_SAID = {
    "config": "a YAML file is the first word: rope-patch COMMAND CONFIG.yaml",
    "trust-remote-code": "code that lies beside a checkpoint is never run",
}
_COMMANDS = {
    "finetune": ("train", "tune", "fine-tune", "sft", "lora"),
    "perplexity": ("ppl", "eval", "evaluate", "benchmark", "bench", "test"),
    "export": ("convert", "save", "apply", "patch"),
    "demo-chat": ("chat", "run", "generate", "demo"),
    "list": ("schemes", "methods", "ls"),
    "checkpoint": ("download", "fetch", "pull"),
    "describe": ("info", "show", "inspect", "explain"),
    "doctor": ("check", "diagnose", "lint"),
    "passkey": ("needle", "niah"),
}
"""Other programs' names for the commands."""

_GONE = {
    "ruler": "lm-evaluation-harness runs RULER under a scheme: write python -m rope_patch.evaluation.lm_eval "
    "--model rope_patch --model_args 'pretrained=DIR,scheme=yarn:factor=4' --tasks ruler",
}
"""Commands of earlier versions, and what to run instead."""


def no_command(typed: str, available: Collection[str]) -> str:
    """The message for an unknown command."""
    if typed.startswith("-"):
        return f"{typed!r} stands before the command; write rope-patch COMMAND {typed} ..."
    if typed in _GONE:
        return f"the command {typed!r} is gone; {_GONE[typed]}"
    meant = [name for name, others in _COMMANDS.items() if typed.lower() in others and name in available]
    hint = f"did you mean {meant[0]!r}? allowed: {', '.join(sorted(available))}" if meant else ""
    return f"there is no command {typed!r}; {hint or did_you_mean(typed, available)}"


def no_option(flag: str, words: Sequence[str], allowed: Collection[str], alone: Collection[str]) -> EvaluationError:
    """The error for an unknown option.

    Args:
        flag: the option as typed, without its value.
        words: words of the command line.
        allowed: the options of the command, with their dashes.
        alone: the word that the command takes without an option.
    """
    name, no = flag.lstrip("-").replace("_", "-"), f"there is no option {flag!r}"
    if name in _SAID:
        return EvaluationError(f"{no}; {_SAID[name]}")
    if name in _FIELDS and "--scheme" in allowed:
        return EvaluationError(f"{no}; a field stands inside the scheme: write --scheme {_with_field(flag, words)}")
    group = next((names for names in _ALIKE if name in names), [])
    if not {name, *group}.isdisjoint(alone):
        return EvaluationError(f"{no}; write its value alone")
    if group:
        meant = [f"--{other}" for other in group if f"--{other}" in allowed]
    else:
        meant = [f"--{other}" for other in nearest(name, [each.removeprefix("--") for each in allowed])]
    hint = f"did you mean {meant[0]!r}? " if meant else ""
    return EvaluationError(f"{no}; {hint}allowed: {', '.join(sorted(allowed))}")


def _with_field(flag: str, words: Sequence[str]) -> str:
    """The scheme of a command line, with the field that was typed as an option."""
    from rope_patch.schemes.registry import with_fields

    joined = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    after = joined[joined.index(flag) + 1 :]
    value = after[0] if after and not after[0].startswith("--") else "..."
    schemes = [named for word, named in pairwise(joined) if word == "--scheme"]
    scheme, field = schemes[-1] if schemes else "NAME", flag.lstrip("-").replace("-", "_")
    return scheme if f"{field}=" in scheme else with_fields(scheme, {field: value})


def no_place(words: Sequence[str], allowed: Collection[str]) -> EvaluationError:
    """The error for words that belong to no option.

    Args:
        words: the words, at least one.
        allowed: the options of the command, with their dashes.
    """
    word, no = words[0], f"{words[0]!r} stands alone"
    if word.lower() in ("true", "false", "yes", "no", "1", "0"):
        return EvaluationError(f"{no}; an option such as --json takes no value, and --no-json turns it off")
    if "--scheme" in allowed and "/" not in word:
        scheme = f"NAME:{word}" if re.fullmatch(r"[a-z_]+=.*", word) else word
        return EvaluationError(f"{no}; if it is {'a field' if scheme != word else 'a scheme'}, write --scheme {scheme}")
    return EvaluationError(f"{no}; put its option in front; allowed: {', '.join(sorted(allowed))}")


def sentence_of(box: str) -> str:
    """Turn the box that tyro draws into a sentence, without line ends, its title and its reminders of the help."""
    parts = re.split(r"^ *-{3,} *$", box, flags=re.MULTILINE)
    text = " ".join((parts[1] if len(parts) > 1 else box).partition("Got errors:")[0].split())
    for pattern, words in _REWRITTEN:
        text = re.sub(pattern, words, text)
    return text


_REWRITTEN = (
    (r"^Error parsing (.+?): ", r"\1: "),
    (r"invalid literal for int\(\) with base 10: (.+)$", r"\1 is not a whole number"),
    (r"could not convert string to float: (.+)$", r"\1 is not a number"),
    (r"no type matching .*INT could be instantiated from \[(.+)\]\.$", r"\1 is not a whole number"),
    (r"no type matching .*FLOAT could be instantiated from \[(.+)\]\.$", r"\1 is not a number"),
    (r"^Missing value for argument '(.+)'\. Expected \d+ values\.$", r"\1 needs a value"),
)
