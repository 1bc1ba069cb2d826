"""A person's own trainer, that of Transformers or TRL: it is given a patched model, and the rest is its own."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import rope_patch
from rope_patch import UnsupportedPositions, get_scheme, patch, repatch
from rope_patch.data.pose import PoSECollator
from rope_patch.data.randomized import RandomizedCollator, numbered
from rope_patch.mounting.parameters import learned_parameters
from rope_patch.patching import find_handle
from rope_patch.training.callbacks import PerplexityCallback
from tests.families import TRAINING_LENGTH, build
from tests.runs import logits
from tests.test_docs import python_blocks

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "finetune.md"
TOKENIZER = ROOT / "recipes" / "assets" / "tiny-llama"
SPECS = [
    "yarn:factor=4",
    "rerope:window=6",
    "rerope:window=6+logn",
    "rope+kerple:initial_scale=1",
    "shaw:max_distance=6",
]
LEARNING = SPECS[3:]
TEXTS = [f"def f{number}(x):\n    return x + {number}\n" * (1 + number % 3) for number in range(16)]
IDS = torch.randint(3, 2048, (1, 3 * TRAINING_LENGTH), generator=torch.Generator().manual_seed(0))

schemes = pytest.mark.parametrize("spec", SPECS)
learning = pytest.mark.parametrize("spec", LEARNING)


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER)


def patched(spec, **changes):
    """The same weights under any scheme."""
    model = build("llama", vocab_size=len(tokenizer()), **changes)
    if spec is not None:
        patch(model, spec)
    return model


def texts():
    return Dataset.from_dict({"text": TEXTS})


def rows():
    """The texts as tokens."""
    return Dataset.from_dict({"input_ids": tokenizer()(TEXTS)["input_ids"]})


def common(folder, **settings):
    """Settings that both trainers take: no device but the CPU, nothing reported, steps that move every weight."""
    return {
        **{"output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1},
        **{"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4, "save_steps": 2, "seed": 3},
        **settings,
    }


def trainer_of(model, folder, **settings):
    collator = DataCollatorWithFlattening()
    arguments = TrainingArguments(**common(folder, **settings))
    return Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows(), data_collator=collator)


def sft_trainer_of(model, folder, dataset=None, peft_config=None, **settings):
    plain = {"bf16": False, "gradient_checkpointing": False, "packing": True, "max_length": 3 * TRAINING_LENGTH}
    arguments = trl.SFTConfig(**common(folder, **{**plain, **settings}))
    dataset = texts() if dataset is None else dataset
    given = {"train_dataset": dataset, "processing_class": tokenizer(), "peft_config": peft_config}
    return trl.SFTTrainer(model, arguments, **given)


class StopAfter(TrainerCallback):
    """Ends a run as one that is interrupted after a checkpoint."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


TRAINERS = pytest.mark.parametrize("make", [trainer_of, sft_trainer_of], ids=["Trainer", "SFTTrainer"])


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def documents(batch):
    """Where the documents of a flattened batch begin and end."""
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    return list(zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True))


def nll_alone(model, ids):
    """Of every token of one document but its first, with nothing around it."""
    return cross_entropy(logits(model, ids[None])[0, :-1].float(), ids[1:], reduction="none")


def nll_in_batch(model, batch):
    """As `SFTTrainer` computes it: `(tokens - 1)`."""
    with torch.no_grad():
        return -model.eval()(**batch, use_cache=False, fused_lm_head=True).log_probs[0]


def differences(model, batch, alone=None):
    """By how much the NLL of a token in the batch differs from that in its document alone, by document."""
    found, ids = nll_in_batch(model, batch), batch["input_ids"][0]
    apart = [nll_alone(alone or model, ids[start:stop]) for start, stop in documents(batch)]
    together = [found[start : stop - 1] for start, stop in documents(batch)]
    return [(one - other).abs().max().item() for one, other in zip(together, apart, strict=True)]


@pytest.mark.one_in(2)
@TRAINERS
@schemes
def test_what_was_saved_comes_back_under_its_scheme(make, spec, tmp_path):
    model = patched(spec)
    start = weights(model)
    trainer = make(model, tmp_path / "runs")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert all(not torch.equal(value, start[name]) for name, value in learned_parameters(model).items())
    assert not torch.equal(start["lm_head.weight"], model.lm_head.weight)

    again = rope_patch.from_pretrained(tmp_path / "saved")
    assert find_handle(again).scheme == find_handle(model).scheme
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    last = rope_patch.from_pretrained(tmp_path / "runs" / "checkpoint-4")
    assert torch.equal(logits(last, IDS), logits(model, IDS))

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")  # without this library
    carries = torch.allclose(logits(plain, IDS), logits(model, IDS), atol=1e-4)
    assert carries == spec.startswith("yarn")  # which Transformers has words for
    repatch(plain)
    assert torch.equal(logits(plain, IDS), logits(model, IDS))


@pytest.mark.one_in(7)
@TRAINERS
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str)
@schemes
def test_a_resumed_run_ends_as_an_unstopped_one_bit_for_bit(make, spec, settings, tmp_path):
    unstopped = make(patched(spec), tmp_path / "whole", **settings)
    unstopped.train()
    stopped = make(patched(spec), tmp_path / "stopped", **settings)
    stopped.add_callback(StopAfter(2))
    stopped.train()
    assert stopped.state.global_step == 2

    model = patched(spec)
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()  # everything has to come from the checkpoint
    resumed = make(model, tmp_path / "stopped", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert_equal(weights(model), weights(unstopped.model))


@pytest.mark.one_in(2)
@TRAINERS
@schemes
def test_gradient_checkpointing_changes_nothing_but_memory(make, spec, tmp_path):
    ends = []
    for settings in ({}, {"gradient_checkpointing": True}):
        trainer = make(patched(spec), tmp_path, save_strategy="no", **settings)
        trainer.train()
        ends.append(weights(trainer.model))
    assert_equal(*ends)


@pytest.mark.one_in(2)
@TRAINERS
@schemes
def test_bfloat16_is_a_matter_of_computing_not_of_the_weights(make, spec, tmp_path):
    losses = []
    for settings in ({}, {"bf16": True}):
        trainer = make(patched(spec), tmp_path / str(settings), save_strategy="no", **settings)
        losses.append(trainer.train().training_loss)
    assert 0 < abs(losses[0] - losses[1]) < 0.05
    trainer.save_model(tmp_path / "saved")
    again = rope_patch.from_pretrained(tmp_path / "saved")
    assert {value.dtype for value in again.parameters()} == {torch.float32}
    assert not torch.equal(logits(trainer.model, IDS), logits(again, IDS))  # the forward of its model keeps autocast
    unwrapped = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    assert torch.equal(logits(unwrapped, IDS), logits(again, IDS))


@schemes
def test_the_best_checkpoint_is_loaded_at_the_end(spec, tmp_path):
    schedule = {"learning_rate": 5.0, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(patched(spec), tmp_path, load_best_model_at_end=True, **schedule)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert not best.endswith("checkpoint-4")  # such steps make it worse
    again = rope_patch.from_pretrained(best)
    assert torch.equal(logits(again, IDS), logits(trainer.model, IDS))


def test_parameters_that_come_after_the_optimizer_are_not_trained(tmp_path):
    late = patched(None)
    trainer = trainer_of(late, tmp_path, save_strategy="no")
    trainer.create_optimizer()
    patch(late, "rope+kerple")
    start = weights(late)
    trainer.train()
    assert not torch.equal(start["lm_head.weight"], late.lm_head.weight)
    assert all(torch.equal(value, start[name]) for name, value in learned_parameters(late).items())


APART = {
    "packed": {"packing": True},
    "split": {"packing": True, "packing_strategy": "bfd_split", "max_length": TRAINING_LENGTH},
    "flattened": {"padding_free": True, "packing": False, "max_length": None},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("settings", APART.values(), ids=APART)
@schemes
def test_documents_of_one_row_are_scored_as_if_each_were_alone(spec, settings, attention, tmp_path):
    model = patched(spec, attn_implementation=attention)
    batch = next(iter(sft_trainer_of(model, tmp_path, **settings).get_train_dataloader()))
    assert len(documents(batch)) > 1
    assert batch["input_ids"].shape[0] == 1
    assert max(differences(model, batch)) < 1e-4


@schemes
def test_the_loss_of_a_flattened_batch_is_that_of_its_documents(spec, tmp_path):
    trainer = trainer_of(patched(spec), tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    ids = batch["input_ids"][0]
    alone = torch.cat([nll_alone(trainer.model, ids[start:stop]) for start, stop in documents(batch)])
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), batch)
        joined = trainer.model(**batch, use_cache=True).loss
    torch.testing.assert_close(loss, alone.mean(), atol=1e-5, rtol=1e-5)
    assert abs(joined - loss) > 1e-3  # beside a cache Transformers takes a row for one text


@schemes
def test_rows_of_wrapped_packing_are_one_text(spec, tmp_path):
    model = patched(spec)
    trainer = sft_trainer_of(model, tmp_path, packing_strategy="wrapped")
    batch = next(iter(trainer.get_train_dataloader()))
    assert "position_ids" not in batch
    assert batch["attention_mask"].all()
    whole = torch.cat([nll_alone(model, ids) for ids in batch["input_ids"]])
    with torch.no_grad():
        loss = trainer.compute_loss(model.eval(), batch)
    torch.testing.assert_close(loss, whole.mean(), atol=1e-5, rtol=1e-5)


def test_frequencies_that_follow_the_length_follow_the_longest_document_of_a_row(tmp_path):
    model = patched("dynamic_yarn")
    batch = next(iter(sft_trainer_of(model, tmp_path).get_train_dataloader()))
    longest = max(stop - start for start, stop in documents(batch))
    assert max(differences(model, batch)) > 0.01
    assert max(differences(model, batch, alone=patched(f"yarn:factor={longest / TRAINING_LENGTH}"))) < 1e-4


@schemes
def test_the_loss_on_completions_alone_is_that_of_their_tokens(spec, tmp_path):
    prompts, completions = zip(
        *((f"{first}:", rest) for first, rest in (text.split(":", 1) for text in TEXTS)), strict=True
    )
    pairs = Dataset.from_dict({"prompt": prompts, "completion": completions})
    trainer = sft_trainer_of(patched(spec), tmp_path, pairs)
    batch = next(iter(trainer.get_train_dataloader()))
    expected = []
    for start, stop in documents(batch):
        ids, labels = batch["input_ids"][0, start:stop], batch["labels"][0, start:stop]
        assert tokenizer().decode(ids[labels == -100]) in prompts
        expected.append(nll_alone(trainer.model, ids)[labels[1:] != -100])
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.eval(), batch)
    torch.testing.assert_close(loss, torch.cat(expected).mean(), atol=1e-5, rtol=1e-5)


def lora(**settings):
    """Adapters that change something from the start, and what the scheme learns beside them."""
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["rope_patch"], init_lora_weights=False, **settings
    )


def train_adapters(spec, folder, trained=False):
    """A checkpoint saved under the scheme in `base`, adapters on it in `adapter`; the model as it was trained."""
    base = patched(spec)
    for value in learned_parameters(base).values() if trained else ():
        value.data += torch.randn(value.shape)
    base.save_pretrained(folder / "base")
    trainer = sft_trainer_of(rope_patch.from_pretrained(folder / "base"), folder / "runs", peft_config=lora())
    trainer.train()
    trainer.save_model(folder / "adapter")
    return trainer.model


@schemes
def test_adapters_find_the_scheme_with_the_checkpoint_that_they_name(spec, tmp_path):
    trained = train_adapters(spec, tmp_path)
    expected = logits(trained, IDS)
    base = rope_patch.from_pretrained(tmp_path / "base")
    assert not torch.equal(logits(base, IDS), expected)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(adapted, IDS), expected)
    again = rope_patch.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(again, IDS), expected)

    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = rope_patch.from_pretrained(tmp_path / "merged")
    assert find_handle(merged).scheme == find_handle(trained).scheme
    torch.testing.assert_close(logits(merged, IDS), expected, atol=1e-3, rtol=1e-3)


@schemes
def test_adapters_on_a_plain_checkpoint_find_the_scheme_beside_them(spec, tmp_path):
    patched(None).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    patch(model, spec)
    trainer = sft_trainer_of(model, tmp_path / "runs", peft_config=lora())
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    again = rope_patch.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(again, IDS), logits(trainer.model, IDS))
    record = tmp_path / "adapter" / "rope_patch.json"
    assert json.loads(record.read_text())["rope_patch"]["scheme"] == find_handle(again).scheme.to_dict()
    record.unlink()  # as adapters of plain models
    assert find_handle(rope_patch.from_pretrained(tmp_path / "adapter")) is None
    trainer.model.config.save_pretrained(tmp_path / "adapter")
    again = rope_patch.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(again, IDS), logits(trainer.model, IDS))


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PromptEncoderConfig])
@schemes
def test_learned_prompts_record_the_scheme(spec, kind, tmp_path):
    patched(None).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    patch(model, spec)
    adapted = peft.get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with pytest.warns(rope_patch.RopePatchWarning, match=r"rope_patch.save_pretrained\(model, FOLDER\) records it"):
        adapted.save_pretrained(tmp_path / "plain-prompt")
    rope_patch.save_pretrained(adapted, tmp_path / "prompt")
    again = rope_patch.from_pretrained(tmp_path / "prompt").eval()
    assert find_handle(again).scheme == find_handle(model).scheme
    assert torch.equal(logits(again, IDS), logits(adapted, IDS))


def test_models_that_share_a_config_of_adapters_record_each_their_own_scheme(tmp_path):
    patched(None).save_pretrained(tmp_path / "plain")
    config, specs, models = lora(), ["pi:factor=2", "rerope:window=6"], []
    for spec in specs:
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
        patch(models[-1], spec)
        models[-1] = peft.get_peft_model(models[-1], config)
    for _ in range(2):
        for spec, model in zip(specs, models, strict=True):
            model.save_pretrained(tmp_path / "adapter")
            record = json.loads((tmp_path / "adapter" / "rope_patch.json").read_text())["rope_patch"]
            assert record["scheme"] == get_scheme(spec).to_dict()
    for model in models:
        rope_patch.unpatch(model)
    assert "save_pretrained" not in vars(config)


@learning
def test_beside_adapters_what_a_scheme_learns_is_trained_where_it_is_named(spec, tmp_path):
    for named in (True, False):
        config = lora()
        config.modules_to_save = ["rope_patch"] if named else None
        trainer = sft_trainer_of(patched(spec), tmp_path, peft_config=config, save_strategy="no")
        assert any(value.requires_grad for value in learned_parameters(trainer.model).values()) == named


@learning
def test_frozen_parameters_of_a_scheme_outlive_a_config_beside_adapters(spec, tmp_path):
    base = patched(spec)
    for value in learned_parameters(base).values():
        value.data += torch.randn(value.shape)
    base.save_pretrained(tmp_path / "base")
    config = lora()
    config.modules_to_save = None
    adapted = peft.get_peft_model(rope_patch.from_pretrained(tmp_path / "base"), config)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.config.save_pretrained(tmp_path / "adapter")
    again = rope_patch.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(again, IDS), logits(adapted, IDS))


def embedded(spec):
    model = AutoModelForCausalLM.from_pretrained(TOKENIZER)
    patch(model, spec)
    return model


@pytest.mark.parametrize(("spec", "with_lora"), [("yarn:factor=4", False), ("rerope:window=128+logn", True)])
def test_rows_of_the_training_length_train_a_longer_one_under_a_measuring_callback(with_lora, spec, tmp_path):
    embedded(spec).save_pretrained(tmp_path / "base")
    model = rope_patch.from_pretrained(tmp_path / "base")
    seen = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given.get("position_ids")), with_kwargs=True)
    settings = {"bf16": False, "max_length": 256, "gradient_checkpointing": True, "learning_rate": 1e-3}
    arguments = trl.SFTConfig(**common(tmp_path / "runs", **settings, max_steps=2, save_strategy="no"))
    files = [path.read_text()[:4000] for path in sorted((ROOT / "recipes").glob("*.py"))]
    trainer = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": files[:4]}),
        processing_class=tokenizer(),
        data_collator=PoSECollator(target_length=1024),
        peft_config=lora() if with_lora else None,
    )
    measured = {"every": 1, "targets": 64, "documents": 2, "windows_per_document": 1}
    trainer.add_callback(PerplexityCallback(files[4:6], [256, 512], **measured, log=trainer.log))
    trainer.train()
    skips = [positions for positions in seen if positions is not None and (positions.diff() > 1).any()]
    assert skips
    assert max(positions.max() for positions in skips) in range(256, 1024)
    points = [json.loads(line) for line in (tmp_path / "runs" / "perplexity.jsonl").read_text().splitlines()]
    assert [(point["step"], point["length"]) for point in points] == [(s, n) for s in range(3) for n in (256, 512)]
    assert len({point["nll"] for point in points}) == 6  # it learns
    assert sum("eval_perplexity_512" in log for log in trainer.state.log_history) == 3

    trainer.save_model(tmp_path / "saved")
    again = rope_patch.from_pretrained(tmp_path / "saved")
    assert find_handle(again).scheme == find_handle(trainer.model).scheme
    ids = torch.randint(3, 2048, (1, 600))
    assert torch.equal(logits(again, ids), logits(trainer.model, ids))


def test_pose_learns_the_completions_alone_where_the_rows_say_so(tmp_path):
    prompts, completions = zip(*((f"{text[:8]}", text[8:]) for text in TEXTS), strict=True)
    pairs = Dataset.from_dict({"prompt": prompts, "completion": completions})
    trainer = sft_trainer_of(patched("yarn:factor=4"), tmp_path, pairs, packing=False)
    trainer.data_collator = PoSECollator(target_length=4 * TRAINING_LENGTH)
    batch = next(iter(trainer.get_train_dataloader()))
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        assert tokenizer().decode(ids[(labels == -100) & (mask == 1)]) in prompts


def test_trl_trains_on_growing_ranges_of_positions(tmp_path):
    model, seen = patched("yarn:factor=4"), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["position_ids"].max()), with_kwargs=True)
    rows = numbered(Dataset.from_dict({"input_ids": [tokenizer()(text)["input_ids"][:16] for text in TEXTS]}), 6)
    settings = {"train_sampling_strategy": "sequential", "remove_unused_columns": False, "max_steps": 3}
    settings |= {"per_device_train_batch_size": 2, "dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False}
    arguments = trl.SFTConfig(**common(tmp_path, **settings, save_strategy="no"))
    collator = RandomizedCollator((16, 60, 4000), rows=6)
    given = {"train_dataset": rows, "processing_class": tokenizer(), "data_collator": collator}
    trl.SFTTrainer(model, arguments, **given, peft_config=lora()).train()
    assert seen[0] < 16 < seen[1] < 60 < seen[2]


def test_prefix_tuning_is_refused_where_transformers_lets_a_prefix_through(tmp_path):
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)

    def make(**settings):
        return sft_trainer_of(patched("rerope:window=6"), tmp_path, peft_config=config, packing=False, **settings)

    with pytest.raises(UnsupportedPositions, match="prefix tuning"):
        make().train()
    unseen = make(gradient_checkpointing=True, save_strategy="no")
    start = weights(unseen.model)
    unseen.train()
    assert_equal(weights(unseen.model), start)


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capfd):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in python_blocks(PAGE):
        exec(
            code.replace("[256, 512, 1024]", "[64, 128], targets=64").replace('"max_length": 512', '"max_length": 128'),
            names,
        )
    assert find_handle(names["adapted"]).scheme == find_handle(names["model"]).scheme
