"""Two processes on gloo train what one trains. `both` and `bereft` are what each of two does."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rope_patch
from rope_patch import cli
from rope_patch.errors import EvaluationError, UnsupportedPositions
from rope_patch.evaluation.results import ResultFile
from rope_patch.finetuning import chart, parallel
from rope_patch.finetuning.description import FineTuning
from rope_patch.finetuning.experiment import folder_name, run
from rope_patch.finetuning.in_memory import MemoryRows
from rope_patch.patching import find_handle
from rope_patch.training.cross_entropy import LanguageModelLoss
from rope_patch.training.loop import Diverged

from ..evaluation.conftest import byte_tokenizer, documents, tiny_llama
from ..processes import run_two

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs" / "accelerate"
SHAW = "rope+shaw:max_distance=8"
CASES = {
    "ddp, full": {"parallel": "ddp"},
    "ddp, adapters": {"parallel": "ddp", "method": "lora", "schemes": ("rerope:window=8",), "layout": "padded"},
    "ddp, checkpointing": {"parallel": "ddp", "gradient_checkpointing": True, "schemes": (SHAW,)},
    "fsdp2, full": {"parallel": "fsdp2", "check_memory": True},
    "fsdp2, learned": {"parallel": "fsdp2", "schemes": (SHAW,), "layout": "padded", "gradient_checkpointing": True},
    "fsdp2, adapters": {"parallel": "fsdp2", "method": "lora", "schemes": (SHAW,), "layout": "padded"},
    "fsdp2, norms": {"parallel": "fsdp2", "method": "lora_norms_embeddings", "schemes": ("rerope:window=8",)},
    "fsdp2, warm start": {"parallel": "fsdp2", "warm_start_steps": 1, "schemes": ("rerope:window=8",)},
}
# trained for two steps by so many processes, and then by the other number
HANDED_OVER = {"ddp, full": "ddp", "fsdp2, adapters": "fsdp2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint, the texts."""
    folder = tmp_path_factory.mktemp("parallel")
    tiny_llama().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    for name, lengths in {"train": (90, 70, 40, 33, 120, 60, 55, 20), "held out": (45, 50, 37, 20)}.items():
        lines = [json.dumps(document) for document in documents(*lengths)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def describe(folder, output, **fields):
    settings = {
        "length": 32,
        "schemes": ("yarn:factor=auto",),
        "model": str(folder / "model"),
        "text": str(folder / "train.jsonl"),
        "eval_text": str(folder / "held out.jsonl"),
        "targets": 8,
        "steps": 3,
        "batch_size": 4,
        "micro_batch_size": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "log_every": 1,
        "check_memory": False,
        "device": "cpu",
        "output": str(folder / output),
    }
    return FineTuning(**{**settings, **fields})


def train(folder, output, **fields):
    """A run without its pictures, which take longer than the training."""
    with pytest.MonkeyPatch.context() as changed:
        for name in ("save", "save_curves"):
            changed.setattr(chart, name, lambda *_: Path())
        run(describe(folder, output, **fields))


def perplexity(folder, output):
    """The command, for a checkpoint that is there."""
    words = ["--model", str(folder / "model"), "--text", str(folder / "held out.jsonl"), "--targets", "8"]
    words += ["--scheme", "rerope:window=8", "--lengths", "16,32", "--device", "cpu", "--output", str(output)]
    assert cli.main(["perplexity", *words]) == 0


def both(rank, folder):
    """Everything that two processes have to do, in one start of them."""
    # as `accelerate launch` sets it unless told otherwise: the weights of all processes but one would stay empty
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    for name, fields in CASES.items():
        train(folder, f"two/{name}", **fields)
    for name, fields in CASES.items():
        if name in HANDED_OVER:
            train(folder, f"from two/{name}", **{**fields, "steps": 2})
            train(folder, f"from one/{name}", **fields)
    train(folder, "bereft", parallel="fsdp2")
    found = {"diverged": diverged(folder, rank), "refused": refused(), "said": said(folder)}
    perplexity(folder, folder / "two" / "perplexity")
    (folder / f"{rank}.json").write_text(json.dumps(found))


def diverged(folder, rank):
    """What a loss that is not finite on the second process alone raises."""
    healthy = LanguageModelLoss.forward
    LanguageModelLoss.forward = lambda self, *batch: healthy(self, *batch) * (float("nan") if rank else 1.0)
    try:
        train(folder, "diverged", parallel="ddp")
    except Diverged as error:
        return str(error)
    finally:
        LanguageModelLoss.forward = healthy
    return None


def refused():
    """What a model of this library says where torch divides a row."""
    model, row = tiny_llama(), torch.arange(32)[None]
    rope_patch.patch(model, "rerope:window=8")
    with torch.no_grad(), context_parallel(init_device_mesh("cpu", (2,)), buffers=[row], buffer_seq_dims=[1]):
        try:
            model(row, position_ids=row, use_cache=False)
        except UnsupportedPositions as error:
            return str(error)
    return None


def said(folder):
    """What the command line prints on this process."""
    description = describe(folder, "said", parallel="fsdp2")
    fields = {name: value for name, value in dataclasses.asdict(description).items() if value is not None}
    (config := folder / f"said {distributed.get_rank()}.yaml").write_text(json.dumps(fields))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        status = cli.main(["finetune", str(config)])
    return status, out.getvalue(), error.getvalue()


def bereft(rank, folder):
    """The second process is killed in the third step; the first has to end without it."""
    if rank:
        batch = MemoryRows.batch
        MemoryRows.batch = lambda rows, step: os.kill(os.getpid(), signal.SIGKILL) if step == 2 else batch(rows, step)
    train(folder, "bereft", parallel="fsdp2", save_every_seconds=0.0)


@pytest.fixture(scope="module")
def together(folder):
    """What each of two found, after what one left and what two left that were killed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the two have: threads divide a sum in their own way
    try:
        for name in HANDED_OVER:
            train(folder, f"from one/{name}", **{**CASES[name], "steps": 2})
        codes = run_two(bereft, folder)
        interrupted = torch.load(folder / "bereft" / folder_name("yarn:factor=auto") / "state.pt", weights_only=True)
        assert run_two(both, folder) == [0, 0]
        for name, fields in CASES.items():
            train(folder, f"one/{name}", **fields)
        for name in HANDED_OVER:
            train(folder, f"from two/{name}", **CASES[name])
        perplexity(folder, folder / "one" / "perplexity")
    finally:
        torch.set_num_threads(threads)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {"codes": codes, "interrupted": interrupted["step"], "found": found}


def log(folder, output):
    (path,) = (folder / output).glob("*/log.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(folder, output):
    """Rows without what the clock says, and without the sources, which somebody may be editing meanwhile."""
    passing = {"seconds": 0.0, "tokens_per_second": 0.0, "code": "", "commit": None}
    file = ResultFile(folder / output / "perplexity.jsonl")
    return [dataclasses.replace(row, **passing) for row in file.rows]


def assert_same_training(folder, one, two, **fields):
    """Same losses, same rows before the training, and same weights and losses after it, to rounding."""
    (spec,) = describe(folder, one, **fields).schemes
    first, second = log(folder, one), log(folder, two)
    assert [row["step"] for row in second] == [row["step"] for row in first]
    for ours, theirs in zip(second, first, strict=True):
        assert ours["train_nll"] == pytest.approx(theirs["train_nll"], abs=2e-4)
    rows, expected = measured(folder, two), measured(folder, one)
    untrained = [row for row in expected if row.weights == expected[0].weights]
    assert len(untrained) < len(expected)
    assert rows[: len(untrained)] == untrained
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours.nll == pytest.approx(theirs.nll, abs=1e-5)
    place = Path(folder_name(spec), "checkpoint")
    model, reference = (rope_patch.from_pretrained(folder / output / place) for output in (two, one))
    assert str(find_handle(model).scheme) == str(find_handle(reference).scheme)
    trained, wanted = model.state_dict(), reference.state_dict()
    assert trained.keys() == wanted.keys()
    assert max((trained[name] - wanted[name]).abs().max() for name in wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_what_one_trains(together, folder, name):
    assert_same_training(folder, f"one/{name}", f"two/{name}", **CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("start", ["from one", "from two"])
@pytest.mark.parametrize("name", HANDED_OVER)
def test_another_number_of_processes_goes_on(together, folder, name, start):
    whole, resumed = log(folder, f"one/{name}"), log(folder, f"{start}/{name}")
    assert resumed[-1]["step"] == 3
    assert resumed[-1]["nll"] == pytest.approx(whole[-1]["nll"], abs=1e-5)


@pytest.mark.slow
def test_what_was_killed_goes_on(together, folder):
    killed, bereaved = together["codes"][1], together["codes"][0]
    assert killed == -signal.SIGKILL
    assert bereaved not in (None, 0)  # it neither hung nor took the run for finished
    assert together["interrupted"] == 1
    assert log(folder, "bereft")[-1]["nll"] == pytest.approx(log(folder, "one/fsdp2, full")[-1]["nll"], abs=1e-5)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_stops_both(together):
    first, second = (found["diverged"] for found in together["found"])
    assert first == second
    assert first.startswith("step 1: the loss is nan")


@pytest.mark.slow
def test_only_one_process_speaks(together):
    first, second = (found["said"] for found in together["found"])
    assert first[0] == second[0] == 0
    assert "checkpoint" in first[1]
    assert second[1:] == ["", ""]


@pytest.mark.slow
def test_the_perplexity_of_a_checkpoint_is_the_same_to_the_last_digit(together, folder):
    assert measured(folder, "two/perplexity") == measured(folder, "one/perplexity")


@pytest.mark.slow
def test_attention_of_this_library_refuses_a_part_of_a_row(together):
    for found in together["found"]:
        assert "the attention of rerope:window=8 sees only the part of the row" in found["refused"]


def test_deepspeed_in_place_of_attention_is_refused(monkeypatch):
    def attention(*_, **__):
        raise AssertionError("not asked")

    attention.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    model, row = tiny_llama(), torch.arange(32)[None]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attention)
    for scheme in ("rerope:window=8", "dynamic_ntk"):
        with rope_patch.patch(model, scheme), pytest.raises(UnsupportedPositions, match="part of the row"):
            model(row)


@pytest.mark.parametrize("scheme", ["rerope:window=8", "dynamic_ntk", "alibi"])
def test_schemes_that_cannot_share_rows_are_named(scheme):
    handle = rope_patch.patch(tiny_llama(), scheme)
    with pytest.raises(UnsupportedPositions, match=f"context_parallel=2: {scheme}.* is mounted .*late.*only the part"):
        parallel.check_context_parallel(handle, 2, torch.device("cpu"))


def test_rows_are_not_shared_by_this_recipe():
    handle = rope_patch.patch(tiny_llama(), "yarn:factor=2")
    parallel.check_context_parallel(handle, 1, torch.device("cpu"))
    for shared in (handle, None):
        with pytest.raises(EvaluationError, match=r"ParallelismConfig\(cp_size=...\), see docs/parallel.md"):
            parallel.check_context_parallel(shared, 2, torch.device("cpu"))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_takes_the_configs_and_auto_follows_them(name, monkeypatch):
    path = str(CONFIGS / f"{name}.yaml")
    assert load_config_from_file(path).num_processes == 2
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "script.py"]))
    variables = prepare_multi_gpu_env(arguments)
    for variable in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.delenv(variable, raising=False)
        if variable in variables:
            monkeypatch.setenv(variable, variables[variable])
    assert variables.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "false"
    assert parallel.chosen("auto") == name
    assert parallel.chosen("ddp") == "ddp"


def test_the_first_version_of_fsdp_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for version in ("1", None):
        monkeypatch.setenv("FSDP_VERSION", version) if version else monkeypatch.delenv("FSDP_VERSION")
        with pytest.raises(EvaluationError, match="FSDP 1; only version 2"):
            parallel.chosen("auto")
    assert parallel.chosen("fsdp2") == "fsdp2"


def test_one_process_is_not_wrapped():
    loss = LanguageModelLoss(tiny_llama())
    assert parallel.wrap(loss, torch.device("cpu"), "fsdp2") is loss
    assert parallel.rank() == 0
    with parallel.whole(loss), parallel.accumulating(loss, more=True):
        assert parallel.whole_weights(loss).keys() == loss.model.state_dict().keys()
