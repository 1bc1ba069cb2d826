"""Losses, training and speed of a real checkpoint on a GPU: parts of `make gpu`, which resume after a stop.

python -m benchmarks.checkpoint --model FOLDER [--length 32768] [--only far finetune serve] [--out runs/gpu]

`far`: loss of the same tokens after L/8 to --length tokens, which also shows what short text costs, and of a repeated
passage. `finetune`: LoRA under YaRN and ReRoPE at --length, measured before and after. `serve`: generated tokens a
second. The text is Python's standard library, or --text FILE; what is scored is never trained on. It needs torch,
transformers, accelerate and peft, and no network.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import machine
from rope_patch import patch
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.evaluation.row import provenance
from rope_patch.json_files import read_object
from rope_patch.training.chunked_loss import chunked_loss

TARGETS = 256
"""Scored tokens at the end of a text."""
WINDOWS = 4
"""Texts that are scored: windows of the full length, one after the other."""


def schemes(trained: int, longest: int) -> list[str | None]:
    """What `far` compares on a checkpoint with `trained` tokens of L, up to `longest` tokens; None is the plain one."""
    factors = sorted({min(2 * trained, longest), longest})
    return [
        None,
        *(f"yarn:target={length}" for length in factors),
        f"rerope:window={trained // 2}+logn",
        f"self_extend:target={longest},window={trained // 2}",
        f"dca:chunk_size={3 * trained // 4}",
        f"lm_infinite:local_window={trained - 4}",
    ]


class Stages:
    """The measurements, and the JSON file that has the results of those that are done.

    Attributes:
        options: the command line.
        path: of the results; every finished part is written at once.
        done: results by stage and part.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.path = options, options.out / "checkpoint.json"
        self.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        settings = {name: str(value) for name, value in vars(options).items() if name != "only"}
        facts = {**machine.facts(options.device), "commit": provenance()["commit"], "options": settings}
        kept = kept_in(self.path)
        self.facts, self.done = facts, {}
        if kept.get("facts") == facts:
            self.done = kept["done"]
        else:  # nothing of another machine, commit or command line is continued
            for state in options.out.glob("*.pt"):
                state.unlink()
            self._write()

    def part(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure a part, unless it is done; an error is a result that the next run tries again."""
        if self.done.get(name, {"error": ""}).get("error") is None:
            return
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        try:
            found = {"result": measure(), "error": None}
        except Exception as error:  # other parts still run
            found = {"result": None, "error": f"{type(error).__name__}: {error}"}
        self.done[name] = {**found, "seconds": round(time.perf_counter() - start, 1)}
        self._write()
        print(json.dumps(self.done[name]), flush=True)

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".tmp")
        aside.write_text(json.dumps({"facts": self.facts, "done": self.done}, indent=1) + "\n")
        aside.replace(self.path)

    def finetune(self) -> None:
        """LoRA at the full length; a cut run continues at its last saved step."""
        for scheme in (f"yarn:target={self.options.length}", f"rerope:window={self.trained() // 2}"):
            self.part(f"finetune/{scheme}", partial(self._finetuned, scheme))

    def far(self) -> None:
        """Loss of the same last tokens, in nats: after ever longer text, after a copy, and after a cut at L."""
        for scheme in schemes(self.trained(), self.options.length):
            self.part(f"far/{scheme or 'plain'}", partial(self._far, scheme))

    def serve(self) -> None:
        """Generated tokens a second of a batch of prompts. SDPA plans each new length for cuDNN, which is slow when one
        token is decoded after the other, so that the plain model also runs without.
        """
        for scheme, cudnn in ((None, True), (None, False), (f"rerope:window={self.trained() // 2}", False)):
            name = f"serve/{scheme or 'plain'}{'' if cudnn else ' without cuDNN'}"
            self.part(name, partial(self._served, scheme, cudnn))

    def _model(self, scheme: str | None) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.options.model, dtype=self.dtype, local_files_only=True)
        if scheme:
            patch(model, scheme)
        return model.to(self.options.device)

    def trained(self) -> int:
        """The training length of the checkpoint."""
        config = json.loads((Path(self.options.model) / "config.json").read_text())
        return int(config.get("original_max_position_embeddings") or config["max_position_embeddings"])

    @functools.cached_property
    def _text(self) -> torch.Tensor:
        """Tokens of the text, as many as all parts need."""
        tokenizer = AutoTokenizer.from_pretrained(self.options.model, local_files_only=True)
        rows = (WINDOWS + 1 + self.options.steps) * self.options.length
        needed, found = max(rows, self.options.rows * self.options.prompt), []
        library = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        for path in [self.options.text] if self.options.text else library:
            found += tokenizer(path.read_text(encoding="utf-8", errors="replace"), verbose=False).input_ids
            if len(found) > needed:
                break
        return torch.tensor(found, device=self.options.device)[None]

    def _tokens(self, start: int, count: int) -> torch.Tensor:
        """Tokens `(1, count)` from a place on.

        Raises:
            ValueError: the text ends before: going on at its start would train on what is scored.
        """
        if start + count > self._text.shape[1]:
            raise ValueError(f"the text has {self._text.shape[1]} tokens, {start + count} are needed: lower --length")
        return self._text[:, start : start + count]

    def _finetuned(self, scheme: str) -> dict[str, Any]:
        options, torch_state = self.options, self.options.out / f"{scheme.partition(':')[0]}.pt"
        model = self._model(scheme)
        before = self._measured(model.eval())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=8)).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimiser, losses = torch.optim.AdamW(trained, lr=2e-4), []
        if torch_state.exists():
            state = torch.load(torch_state, weights_only=True)
            set_peft_model_state_dict(model, state["adapters"])
            optimiser.load_state_dict(state["optimiser"])
            losses = state["losses"]
        start, first = time.perf_counter(), len(losses)
        for step in range(first, options.steps):
            ids = self._tokens((WINDOWS + 1 + step) * options.length, options.length)
            with chunked_loss(model):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(round(loss.item(), 4))
            aside = torch_state.with_suffix(".tmp")  # a cut run keeps the step before
            adapters = get_peft_model_state_dict(model)
            torch.save({"adapters": adapters, "optimiser": optimiser.state_dict(), "losses": losses}, aside)
            aside.replace(torch_state)
        seconds = (time.perf_counter() - start) / max(1, options.steps - first)
        found = {"losses": losses, "tokens_per_second": round(options.length / seconds), "resumed_at": first}
        return found | {"before": before, "after": self._measured(model.eval())}

    def _far(self, scheme: str | None) -> dict[str, list[float]]:
        return self._measured(self._model(scheme).eval())

    @torch.no_grad()
    def _measured(self, model: Any) -> dict[str, list[float]]:
        """Loss in nats of the last tokens of every window, and its standard error over windows."""
        trained, longest = self.trained(), self.options.length
        scored: dict[str, list[float]] = {}

        def score(name: str, ids: torch.Tensor, targets: int = TARGETS) -> None:
            scored.setdefault(name, []).append(float(chunked_nll(model, ids[:, :-1], ids[:, -targets:]).mean()))

        for window in range(WINDOWS):
            text = self._tokens(window * longest, longest + 1)
            for length in lengths(trained, longest):
                score(f"last {TARGETS} after {length}", text[:, -length - 1 :])
            passage = text[:, 32 : 32 + min(TARGETS, trained // 4)]
            copied = torch.cat([text[:, : longest - passage.shape[1]], passage], dim=1)
            targets = passage.shape[1] - passage.shape[1] // 4
            score("repeat", copied, targets)
            score("repeat, cut at L", copied[:, -trained:], targets)
        error = WINDOWS**-0.5
        return {name: [round(mean(x), 4), round(error * stdev(x), 4)] for name, x in scored.items()}

    @torch.no_grad()
    def _served(self, scheme: str | None, cudnn: bool = True) -> dict[str, float]:
        model, rows, new = self._model(scheme).eval(), self.options.rows, self.options.new
        prompts = self._tokens(0, rows * self.options.prompt).view(rows, -1)
        found, backends = {}, BACKENDS if cudnn else BACKENDS[1:]
        for tokens in (1, new):  # the first call also warms up
            start = time.perf_counter()
            length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            with sdpa_kernel(backends):
                mask = torch.ones_like(prompts)
                model.generate(prompts, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
            if self.options.device == "cuda":
                torch.cuda.synchronize()
            found[f"seconds for {tokens}"] = round(time.perf_counter() - start, 3)
        return {**found, "tokens_per_second": round(rows * new / found[f"seconds for {new}"], 1)}


def lengths(trained: int, longest: int) -> list[int]:
    """L/8, L/2, L, 2L, 4L ... tokens up to the longest, without those that are too short for the scored tokens."""
    found = [trained // 8, trained // 2]
    while trained <= longest:
        found.append(trained)
        trained *= 2
    return [length for length in found if TARGETS <= length <= longest]


def kept_in(path: Path) -> dict[str, Any]:
    """The results of an earlier run; empty where the file is missing or damaged."""
    try:
        return read_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


BACKENDS = [getattr(SDPBackend, f"{name}_ATTENTION") for name in ("CUDNN", "FLASH", "EFFICIENT")] + [SDPBackend.MATH]
NAMES = ("far", "finetune", "serve")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what is measured, and at which sizes."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--text", type=Path, help="text file to score and to train on (default: Python's library)")
    parser.add_argument("--length", type=int, default=32768, help="longest text in tokens (default %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each fine-tune (default %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="prompts served at once (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer (default %(default)s)")


def main(words: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        2 without the device, 1 if a part failed, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description="Measure a checkpoint.")
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    add_options(parser)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="stages (default all)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (%(default)s)")
    options = parser.parse_args(words)
    if reason := machine.missing(options.device):
        print(reason, file=sys.stderr)
        return 2
    stages = Stages(options)
    for name in options.only:
        getattr(stages, name)()
    beyond = stages.done.get("far/plain", {}).get("result") and options.length > stages.trained()
    if beyond and importlib.util.find_spec("matplotlib"):
        from benchmarks import chart

        print(chart.save_losses(stages.done, stages.trained(), options.out / "losses.png"))
    failed = [name for name, part in stages.done.items() if part["error"] is not None]
    print(f"{stages.path}; failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
