"""Which parameters train, that what saves memory changes no loss, and the messages where something is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Trainer, TrainingArguments, default_data_collator

import rope_patch
from rope_patch import patch
from rope_patch.evaluation.row import Row
from rope_patch.evaluation.scheme_specs import display_name
from rope_patch.evaluation.tables import print_table
from rope_patch.patching import find_handle
from rope_patch.training.adapters import make_trainable
from rope_patch.training.checkpoints import SafeTrainer
from rope_patch.training.chunked_loss import chunked_loss
from tests.evaluation.conftest import byte_tokenizer, measure, tiny_llama
from tests.recipes import run_recipe

from .conftest import SCHEME, checkpoint_of, losses, rows, weights, words_of

LEARNED = ("kerple", "rope+shaw:max_distance=8")
METHODS = ("full", "lora", "lora_norms_embeddings")


def prepared(method, scheme=SCHEME, tied=False):
    model = tiny_llama()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    patch(model, scheme)
    return make_trainable(model, method, rank=4, alpha=8.0)


def trained(model):
    """Names as they are without PEFT."""
    names = {name for name, value in model.named_parameters() if value.requires_grad}
    return {name.removeprefix("base_model.model.").replace(".modules_to_save.default", "") for name in names}


def of_layers(*names):
    return {f"model.layers.{layer}.{name}" for layer in range(2) for name in names}


ADAPTERS = of_layers(*(f"self_attn.{name}_proj.lora_{m}.default.weight" for name in "qkvo" for m in "AB"))
NORMS = {"model.norm.weight"} | of_layers("input_layernorm.weight", "post_attention_layernorm.weight")
EMBEDDINGS = {"model.embed_tokens.weight"}
TRAINED = {
    "lora": ADAPTERS,
    "lora_norms": ADAPTERS | NORMS,
    "lora_embeddings": ADAPTERS | EMBEDDINGS,
    "lora_norms_embeddings": ADAPTERS | NORMS | EMBEDDINGS,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", [SCHEME, *LEARNED])
@pytest.mark.parametrize("method", ["full", *TRAINED])
def test_what_is_trained(method, scheme, tied):
    model = prepared(method, scheme, tied)
    learned = {name for name in trained(model) if "rope_patch" in name}
    assert bool(learned) == (scheme in LEARNED)
    if method == "full":
        assert all(value.requires_grad for value in model.parameters())
    else:
        assert trained(model) - learned == TRAINED[method]


def test_a_tied_head_stays_tied_and_another_is_left_alone():
    model = prepared("lora_norms_embeddings", tied=True).get_base_model()
    embeddings = model.get_input_embeddings().modules_to_save["default"].weight
    named = model.named_parameters(remove_duplicate=False)
    (head,) = [value for name, value in named if name.startswith("lm_head") and value.requires_grad]
    assert head is embeddings
    assert "lm_head.weight" not in trained(prepared("lora_norms_embeddings"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", [SCHEME, *LEARNED])
def test_training_moves_what_is_trained_and_nothing_else(method, scheme, finetune):
    chosen = finetune(method=method, scheme=[scheme], learning_rate=1e-2, steps=6)
    found = losses(chosen, scheme)
    assert found[-1] < found[0]
    model = rope_patch.from_pretrained(checkpoint_of(chosen, scheme) / "checkpoint")
    patch(fresh := tiny_llama(), scheme)
    moves, now = trained(prepared(method, scheme)), model.state_dict()
    for name, value in fresh.state_dict().items():
        wanted = name if method == "full" else f"base_model.model.{name}"
        copies = {
            key.replace(".base_layer", "").replace(".modules_to_save.default", ""): key
            for key in now
            if "original_module" not in key
        }
        assert torch.equal(now[copies[wanted]], value) == (name not in moves), name


THRIFTY = {"gradient_checkpointing": True, "micro_batch_size": 1}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        (SCHEME, {"micro_batch_size": 2}),
        (SCHEME, {"loss": "plain"}),
        *((scheme, THRIFTY) for scheme in (SCHEME, "rerope:window=8", "kerple")),
    ],
)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_what_saves_memory_changes_no_loss(settings, layout, scheme, finetune, tmp_path):
    shared = {"scheme": [scheme], "batch_size": 4, "learning_rate": 1e-2, "layout": layout}
    plain, saving = finetune(**shared), finetune(**shared, **settings, output=tmp_path / "saving")
    assert losses(saving, scheme) == pytest.approx(losses(plain, scheme), abs=2e-4)
    assert [row["nll"] for row in rows(saving)] == pytest.approx([row["nll"] for row in rows(plain)], abs=1e-4)


@pytest.mark.parametrize(("method", "dtype"), [("full", "float32"), ("lora_norms_embeddings", "bfloat16")])
def test_bfloat16(method, dtype, finetune, tmp_path):
    shared = {"method": method, "learning_rate": 1e-2, "scheme": ["kerple"]}
    exact = finetune(**shared)
    rounded = finetune(**shared, precision="bfloat16", dtype=dtype, output=tmp_path / "bfloat16")
    assert losses(rounded, "kerple") != losses(exact, "kerple")
    assert losses(rounded, "kerple") == pytest.approx(losses(exact, "kerple"), abs=0.1)
    assert {value.dtype for value in weights(rounded, "kerple").values()} == {torch.float32}
    before = [row["nll"] for row in rows(rounded) if not row["step"]]
    same = dtype == "float32"  # what is trained is measured in float32, whatever it trained in
    assert before == pytest.approx([row["nll"] for row in rows(exact) if not row["step"]], abs=0 if same else 0.1)


def test_what_is_measured_after_the_training_is_what_is_saved(finetune, capsys):
    chosen = finetune(precision="bfloat16", merge=True, method="lora", learning_rate=1e-2)
    model = rope_patch.from_pretrained(checkpoint_of(chosen) / "checkpoint")
    corpus = [{"name": "held out", "text": chosen["eval_text"].read_text()}]
    found = measure(model, byte_tokenizer(), corpus, [SCHEME], [16, 32], targets=8)
    wanted = [row["nll"] for row in rows(chosen) if row["step"] == 4]
    assert [row.nll for row in found] == pytest.approx(wanted, abs=1e-5)


def test_dropout_of_adapters_is_on_in_training_and_off_in_measurements(finetune, tmp_path):
    shared = {"method": "lora", "learning_rate": 1e-2}
    without, with_it = finetune(**shared), finetune(**shared, dropout=0.5, output=tmp_path / "dropout")
    assert [row for row in rows(without) if not row["step"]] == [row for row in rows(with_it) if not row["step"]]
    assert losses(without) != losses(with_it)


def test_a_warm_start_trains_its_steps_under_interpolation(finetune, monkeypatch):
    seen, training_step = [], SafeTrainer.training_step

    def watched(trainer, *arguments):
        seen.append(str(find_handle(trainer.model).scheme))
        return training_step(trainer, *arguments)

    monkeypatch.setattr(SafeTrainer, "training_step", watched)
    chosen = finetune(warm_start_steps=3, scheme=["rerope:window=8"])
    assert seen == ["pi:factor=2.0"] * 3 + ["rerope:window=8"]
    loaded = rope_patch.from_pretrained(checkpoint_of(chosen, "rerope:window=8") / "checkpoint")
    assert str(find_handle(loaded).scheme) == "rerope:window=8"
    assert [row["line"] for row in rows(chosen)][-2:] == ["rerope:window=8"] * 2


def test_the_chunked_loss_serves_the_trainer_of_others(tmp_path):
    ids = torch.randint(1, 257, (6, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    found = []
    for chunks in (None, 3):
        model = tiny_llama()
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2, use_cpu=True
        )
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=default_data_collator)
        if chunks is None:
            found.append((trainer.train().training_loss, model))
        else:
            with chunked_loss(model, chunks):
                found.append((trainer.train().training_loss, model))
    (plain, expected), (chunked, model) = found
    assert chunked == pytest.approx(plain, abs=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=1e-5)


def test_several_schemes_tell_one_story(finetune, options, capsys):
    chosen = finetune(scheme=[SCHEME, "plain"], lengths="16,32,64", evaluate_every=2, json=True)
    points = json.loads(capsys.readouterr().out)
    assert [{**row, **point} for row, point in zip(rows(chosen), points, strict=True)] == points
    assert [(point["line"], point["step"]) for point in points if point["length"] == 64] == [
        *[("plain", 0), ("window", 0), (SCHEME, 0), (SCHEME, 2), (SCHEME, 4), ("plain", 2), ("plain", 4)]
    ]
    print_table([Row(**point) for point in points])
    table = capsys.readouterr().out
    named = ["plain checkpoint, before", *[f"plain checkpoint, {n} steps" for n in (2, 4)], "sliding window"]
    named += [f"{display_name(SCHEME)}, {when}" for when in ("before", "2 steps", "4 steps")]
    places = [table.index(name) for name in named]
    assert places == sorted(places)
    best = min(f"{point['nll']:.3f}" for point in points if point["length"] == 64)
    assert best in table
    assert f"{best}*" not in table  # four steps gain nothing beyond noise


def test_rows_of_an_older_version_share_the_table(finetune, capsys):
    """`finetune.jsonl` had fewer fields once."""
    chosen = finetune()
    lacking = ("model", "scheme", "task", "protocol", "targets", "texts", "dtype", "windows", "seed")
    path = chosen["output"] / "finetune.jsonl"
    for row in (old := rows(chosen)):
        for name in lacking:
            row.pop(name, None)
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    capsys.readouterr()
    finetune(steps=6)
    assert {row["step"] for row in rows(chosen)} == {0, 4, 6}
    table = capsys.readouterr().out
    assert all(f"{display_name(SCHEME)}, {when}" in table for when in ("before", "4 steps", "6 steps"))


def test_the_picture(finetune, options, monkeypatch):
    monkeypatch.undo()  # the fixture leaves it out
    chosen = options()
    assert run_recipe("finetune", words_of(chosen)) == 0
    assert (chosen["output"] / "finetune.png").read_bytes().startswith(b"\x89PNG")


WRONG = {
    "steps=0 is not allowed; it must be at least 1": {"steps": 0},
    "batch_size=3 is not allowed; it must be a multiple of 2": {"batch_size": 3, "micro_batch_size": 2},
    "device=cuda:1 is not allowed": {"device": "cuda:1"},
    "merge with method=full": {"merge": True},
    "held_out=1.0 is not allowed; it is a share between 0 and 1": {"held_out": 1.0},
    "measuring at 90 tokens needs 91 held-out tokens, but the longest of 4": {"eval_text": None, "lengths": 90},
    "dtype=bfloat16 is only for weights frozen by adapters": {"dtype": "bfloat16"},
    "there is no scheme 'yarm'; did you mean 'yarn'": {"scheme": ["yarm"]},
    "there is no option '--lenght'": {"lenght": 3},
    "its learned parameters must exist from the first step on": {"scheme": ["kerple"], "warm_start_steps": 2},
    "needs liger_kernel": {"loss": "liger"},
    "there is no text file at": {"text": "nowhere.txt"},
    "there is no checkpoint './nowhere'": {"model": "./nowhere"},
    "a row has 16 tokens": {"layout": "pose", "length": 8},
    "a row has 40 tokens": {"layout": "pose", "length": 32, "pose_row": 40},
    "pose_row=8 is only for layout=pose, cream and randomized": {"pose_row": 8},
    "position_ranges=(8,) is only for layout=randomized": {"position_ranges": "8"},
    "position_range=8 is not allowed; a row has": {"layout": "randomized", "position_ranges": "8"},
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_said_in_one_line(said, finetune, capsys):
    finetune(2, **WRONG[said])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rope-patch:")]
    told = ("perplexity is measured on", "training reads")  # before the training
    assert len([line for line in lines if not any(words in line for words in told)]) == 1
    assert said in lines[-1]


def test_kernels_for_a_gpu_are_refused_on_a_cpu(finetune, monkeypatch, capsys):
    monkeypatch.setattr("rope_patch.errors.require", lambda *_: None)  # as if Liger were installed
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    finetune(2, loss="liger")
    assert "loss=liger is not allowed on a CPU" in capsys.readouterr().err


def test_adapters_are_not_trained_on(finetune, capsys, tmp_path):
    chosen = finetune(method="lora")
    finetune(2, model=checkpoint_of(chosen) / "checkpoint", output=tmp_path / "again")
    assert "holds adapters; merge them before training on" in capsys.readouterr().err


def test_what_a_scheme_learned_is_not_lost(finetune, capsys, tmp_path):
    chosen = finetune(scheme=["kerple"])
    finetune(2, model=checkpoint_of(chosen, "kerple") / "checkpoint", output=tmp_path / "again")
    assert "training would lose its learned parameters" in capsys.readouterr().err
