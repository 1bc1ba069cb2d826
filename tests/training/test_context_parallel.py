"""Processes that share a row compute what one computes alone."""

from __future__ import annotations

import copy
import datetime
import gc
import os
import signal
import traceback
import warnings

import peft
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import T5Config, T5EncoderModel

import rope_patch
from rope_patch import get_scheme
from rope_patch.attention import behind_cache
from rope_patch.attention.executors import chunked
from rope_patch.errors import EvaluationError, UnsupportedModel, UnsupportedPositions
from rope_patch.models import llama as llama_style
from rope_patch.mounting.parameters import learned_parameters
from rope_patch.training.chunked_loss import chunked_loss
from rope_patch.training.context_parallel import context_parallel, shard
from rope_patch.training.long_ce import LongCE
from tests import families
from tests.cases import ALL, CASES
from tests.families import VOCABULARY, build
from tests.processes import run_many
from tests.reading import remembering

LENGTH = 45
"""Divides by no number of processes; several chunks, groups and windows of the schemes."""

USUAL = [CASES[name] for name in ("dynamic_ntk", "dca", "lm_infinite", "xpos", "fox", "shaw", "sinusoidal")]
USUAL += ["layers:[0=nope+logn;rest=rerope:window=6]"]
BY_HEADS = ["rerope:window=6+logn:training_length=8", CASES["alibi"], CASES["fox"], CASES["ms_poe"]]
ADAPTED = [  # sinks, windows in some layers and experts; windows and norms of queries; norms of queries
    *((spec, "gpt_oss") for spec in ("rerope:window=6+logn:training_length=8", CASES["yarn"], CASES["alibi"])),
    (CASES["dca"], "gemma3"),
    ("layers:[sliding_attention=rope;full_attention=rerope:window=6]", "gemma3"),
    (CASES["self_extend"], "qwen3"),
]
FAMILIES = ["gemma3", "llama_longrope", "gpt_oss", "gemma2", "mistral", "qwen3", "baichuan_alibi"]


def batch(kind):
    """Ids and shifted labels of two rows, with the arguments that describe them, and where logits mean something."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    targets = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    given, tokens = {}, torch.ones(2, LENGTH, dtype=torch.long)
    if kind == "left":
        tokens[0, :20] = 0
    if kind == "right":
        tokens[0, 9:], tokens[1, -4:] = 0, 0  # with four processes one has nothing but pads of the first row
    if kind in ("left", "right"):
        given["attention_mask"] = tokens
    if kind == "packed":
        given["position_ids"] = torch.cat([torch.arange(13), torch.arange(LENGTH - 13)]).expand(2, -1)
    if kind == "skipping":
        given = {
            "attention_mask": tokens,
            "position_ids": (torch.arange(LENGTH) + 9 * (torch.arange(LENGTH) > 20))[None],
        }
    targets = targets.masked_fill(nn.functional.pad(tokens[:, 1:], (0, 1)) * tokens == 0, -100)
    return ids, targets, given, tokens.bool()


def step(model, kind, parallel=None, wrapped=None):
    """The logits of real tokens, and the gradients, of a step on a whole batch."""
    ids, targets, given, real = batch(kind)
    count = (targets != -100).sum()
    if parallel is not None:
        ids, targets, given = (
            parallel.shard(ids),
            parallel.shard(targets),
            {k: parallel.shard(v) for k, v in given.items()},
        )
    model.zero_grad()
    logits = (wrapped or model)(ids, **given, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
    if wrapped is not None:
        loss = loss * distributed.get_world_size()  # which takes the mean of the gradients
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    if parallel is not None:
        logits = parallel.gather(logits)
        for gradient in gradients.values() if wrapped is None else ():
            distributed.all_reduce(gradient)
    return logits[real].detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def patched(spec, family="llama", dtype=torch.float64, **settings):
    model = build(family).to(dtype)
    if family == "gpt_oss":
        model.set_experts_implementation("eager")  # the others know no float64
    if spec:
        rope_patch.patch(model, spec, **settings)
    generator = torch.Generator().manual_seed(5)
    for parameter in learned_parameters(model).values():  # as if they had been trained
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def compare(model, kind="plain", backend="gather", wrapped=None, logits=1e-6, gradients=1e-5):
    """One process against all of them. All find the same, so the first alone computes what is expected."""
    first = distributed.get_rank() == 0
    expected, wanted = step(model, kind) if first else (None, {})
    with context_parallel(model, backend=backend) as parallel:
        found, got = step(model, kind, parallel, wrapped)
    if not first:
        return wanted, got
    torch.testing.assert_close(found, expected, rtol=0, atol=logits)
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            got[name], gradient, rtol=0, atol=gradients, msg=lambda text, name=name: f"{name}: {text}"
        )
    return wanted, got


def in_group(rank, checks):
    """Run all checks in one group of processes, and name those that fail."""
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    warnings.simplefilter("ignore")
    gc.collect(), gc.freeze()  # whoever looks for the models around a backbone need not walk through all imports
    llama_style.read = remembering(llama_style.read)
    behind_cache.SMALL, chunked.SCORES_PER_BLOCK = 200, 300  # short texts take the ways of long ones
    failed = False
    for check, *arguments in checks:
        try:
            globals()[check](*arguments)
        except Exception:
            failed = True
            print(f"process {rank}: {check}{tuple(arguments)}\n{traceback.format_exc()}", flush=True)
    distributed.destroy_process_group()
    raise SystemExit(failed)


def scheme_is_exact(spec, kind, backend="gather", family="llama"):
    compare(patched(spec, family), kind, backend)


KINDS = ("plain", "left", "right", "packed", "skipping")


def of_families(names):
    return [("scheme_is_exact", None, "right" if i % 2 else "plain", "gather", name) for i, name in enumerate(names)]


def test_on_two_processes():
    checks = [("scheme_is_exact", spec, KINDS[i % 5]) for i, spec in enumerate(USUAL)]
    checks += [("scheme_is_exact", spec, KINDS[-i], "ulysses") for i, spec in enumerate(BY_HEADS)]
    checks += [*of_families(FAMILIES[:3]), ("encoder",), ("checkpointing",), ("adapters",), ("longce",)]
    checks += [("scheme_is_exact", CASES[name], "left") for name in ("dynamic_ntk", "logn")]
    checks += [("scheme_is_exact", CASES["dynamic_ntk"], "right"), ("refusals",)]
    assert run_many(2, in_group, checks) == [0, 0]


@pytest.mark.nightly
def test_more_on_two_processes():
    checks = [*of_families(FAMILIES[3:]), ("autocast",), ("wrappers",), ("modes",), ("traffic",)]
    checks += [("scheme_is_exact", CASES["rerope"], "packed", "ulysses", "gemma3"), ("documents",)]
    checks += [("scheme_is_exact", CASES["rerope"], "skipping", "ulysses", "gpt_oss")]
    checks += [("scheme_is_exact", CASES["dca"], "left", "gather", "baichuan_alibi")]
    checks += [("adapters", spec, family) for spec, family in ADAPTED]
    assert run_many(2, in_group, checks) == [0, 0]


def encoder():
    """T5 sees both directions, and its biases are its own or another scheme's."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="relu",
    )
    for spec, backend in ((None, "gather"), ("alibi", "gather"), (CASES["rerope"], "ulysses")):
        torch.manual_seed(0)
        model = T5EncoderModel(config).double().eval()
        if spec:
            rope_patch.patch(model, spec)
        ids, _, given, real = batch("right")
        with torch.no_grad():
            expected = model(ids, **given).last_hidden_state
            with context_parallel(model, backend=backend) as parallel:
                parts = {name: parallel.shard(value) for name, value in given.items()}
                found = parallel.gather(model(parallel.shard(ids), **parts).last_hidden_state)
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-6)


def test_four_processes():
    """Two heads of keys for four processes, and one process with nothing but pads."""
    checks = [("scheme_is_exact", CASES["rerope"], "right", backend) for backend in ("gather", "ulysses")]
    assert run_many(4, in_group, [*checks, ("one_optimiser_step",)]) == [0] * 4


def one_optimiser_step():
    alone, together = patched(CASES["kerple"]), patched(CASES["kerple"])
    for model in (alone, together):
        model.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(alone, "packed")
    with context_parallel(together) as parallel:
        _, gradients = step(together, "packed", parallel)
    for name, parameter in together.named_parameters():
        parameter.grad = gradients[name]
    for model in (alone, together):
        model.optimiser.step()
    # Adam divides by the size of the gradient, so that rounding errors of tiny ones count
    torch.testing.assert_close(dict(together.named_parameters()), dict(alone.named_parameters()), rtol=0, atol=1e-6)


def checkpointing():
    """Two forwards before their backward, so that blocks are computed again out of order."""
    for backend in ("gather", "ulysses"):
        model = patched("rerope:window=6+logn").train()
        compare(model, "packed", backend)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        compare(model, "packed", backend)
        with context_parallel(model, backend=backend) as parallel:
            ids, short = batch("plain")[0], batch("plain")[0][:, :30]
            model.zero_grad()
            losses = [model(parallel.shard(each)).logits.square().sum() for each in (ids, short)]
            sum(losses).backward()
            found = {name: p.grad for name, p in model.named_parameters()}
            for gradient in found.values():
                distributed.all_reduce(gradient)
        model.zero_grad(), [model(each).logits.square().sum().backward() for each in (ids, short)]
        torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()}, rtol=1e-9, atol=1e-7)


def autocast():
    """In bfloat16 both differ from float32 alike."""
    for spec in (None, CASES["rerope"], CASES["fox"]):
        model = patched(spec, dtype=torch.float32)
        exact, _ = step(model, "packed")
        with torch.autocast("cpu", torch.bfloat16):
            alone, _ = step(model, "packed")
            with context_parallel(model) as parallel:
                found, _ = step(model, "packed", parallel)
        assert found.dtype == alone.dtype
        assert (found - exact).norm() < 1.3 * (alone - exact).norm()


def adapters(spec=CASES["kerple"], family="llama"):
    model = patched(spec, family)
    learned = ["rope_patch"] if learned_parameters(model) else None
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False, modules_to_save=learned)
    adapted = peft.get_peft_model(model, config).double()
    _, got = compare(adapted, "left")
    assert {"lora_A", "lora_B"} <= {part for name, value in got.items() if value.any() for part in name.split(".")}


def wrappers():
    spec = "rerope:window=6+ssmax"
    compare(model := patched(spec), "packed", wrapped=DistributedDataParallel(model))
    _, wanted = step(patched(spec), "packed")
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)
    with context_parallel(model) as parallel:
        ids, targets, given, _ = batch("packed")
        given = {name: parallel.shard(value) for name, value in given.items()}
        logits = model(parallel.shard(ids), **given).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), parallel.shard(targets).flatten(), reduction="sum")
        model.zero_grad()
        (2 * loss / (targets != -100).sum()).backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def longce():
    """Short contexts are shared as well: begun anew in documents, of any scheme, with weights on both sides of 1."""
    for spec, kind in ((None, "packed"), ("rerope:window=6+logn:training_length=8", "right")):
        model, (ids, targets, given, _) = patched(spec), batch(kind)
        with torch.no_grad():
            model.lm_head.weight.mul_(5)
        count = (targets != -100).sum()
        with chunked_loss(model, 7, long_ce=LongCE(10, 6)):
            model(ids, labels=ids, shift_labels=targets, num_items_in_batch=count, **given).loss.backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        with chunked_loss(model, 7, long_ce=LongCE(10, 6)), context_parallel(model) as parallel:
            own = {"shift_labels": parallel.shard(targets), **{k: parallel.shard(v) for k, v in given.items()}}
            model(parallel.shard(ids), labels=parallel.shard(ids), num_items_in_batch=count, **own).loss.backward()
        for name, parameter in model.named_parameters():
            distributed.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-5)
        with chunked_loss(model, 7):
            model.zero_grad()
            model(ids, labels=ids, shift_labels=targets, num_items_in_batch=count, **given).loss.backward()
        assert (model.lm_head.weight.grad - expected["lm_head.weight"]).abs().max() > 1e-2


def modes():
    for mode in ("oracle", "chunked", "segmented"):
        compare(patched(CASES["dca"], attention=mode), "packed")
        compare(patched(CASES["yarn"], mount="late", attention=mode), "right")


def refusals():
    for spec, family, reason in (
        (CASES["rnn"], "llama", "state from token to token"),
        (None, "qwen3_5_text", "layers other than attention"),
        (None, "llama4_text", "chunked_attention|partner"),
        ("yarn:factor=2", "llama_dynamic", None),
        ("logn:training_length=8", "llama_dynamic", "follows the length"),
    ):
        if family not in families.FAMILIES:  # nor in this version of Transformers
            continue
        model = build(family)
        if spec:
            with rope_patch.patch(model, spec):
                assert model._supports_context_parallel == (reason is None)
            assert model._supports_context_parallel
            rope_patch.patch(model, spec)
        if reason is None:
            continue
        with pytest.raises(UnsupportedModel, match=reason), context_parallel(model):
            pass
    model = patched("rerope:window=6")
    with pytest.raises(EvaluationError, match="allowed: gather, ulysses"), context_parallel(model, backend="ring"):
        pass
    with (
        pytest.raises(UnsupportedModel, match="use backend='gather'"),
        context_parallel(patched("shaw"), backend="ulysses"),
    ):
        pass
    prompted = peft.get_peft_model(copy.deepcopy(model), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedModel, match="PromptTuningConfig puts its tokens"), context_parallel(prompted):
        pass
    with pytest.raises(EvaluationError, match="a row of 1 tokens"):
        shard(torch.zeros(1, 1))
    with pytest.raises(EvaluationError, match=r"shape \(4,\) has no tokens along dim=1"):
        shard(torch.zeros(4))  # such as the labels of a classifier
    rank, ids = distributed.get_rank(), batch("plain")[0]
    with context_parallel(model) as parallel:
        own = parallel.shard(ids)
        with pytest.raises(UnsupportedPositions, match="divide it with shard"):
            model(own[:, : 20 - rank])
        with pytest.raises(UnsupportedPositions, match="different batches"):
            model(own, attention_mask=torch.ones_like(own) if rank else None)
        with pytest.raises(UnsupportedPositions, match="two axes"):
            model(own, attention_mask=torch.ones(2, 1, own.shape[1], own.shape[1], dtype=torch.bool))
    before = copy.deepcopy(model)(ids).logits
    torch.testing.assert_close(model(ids).logits, before)


def documents():
    """GPT-OSS lets the documents of a packed row see each other on one process; in a shared row they are separate."""
    model = patched(CASES["rerope"], "gpt_oss")
    ids, _, given, _ = batch("packed")
    with torch.no_grad(), context_parallel(model) as parallel:
        positions = parallel.shard(given["position_ids"])
        found = parallel.gather(model(parallel.shard(ids), position_ids=positions).logits)
    with torch.no_grad():
        alone = torch.cat([model(ids[:, :13]).logits, model(ids[:, 13:]).logits], dim=1)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)


def traffic():
    """Bytes that a process receives in each layer are those of the page, however many regions a scheme has."""
    number, batch_size, length, received = distributed.get_world_size(), 2, 48, []
    exchanges = {name: getattr(distributed, name) for name in ("all_gather", "reduce_scatter", "all_to_all_single")}

    def counted(name):
        def exchange(output, given, **keywords):
            whole = given if torch.is_tensor(given) else torch.stack(given)
            if name == "all_gather":
                whole = torch.stack(output)
            if whole.is_floating_point():  # positions and masks are exchanged once a forward
                received.append(whole.nbytes * (number - 1) // number)
            return exchanges[name](output, given, **keywords)

        return exchange

    ids = torch.randint(1, VOCABULARY, (batch_size, length), generator=torch.Generator().manual_seed(0))
    for name in exchanges:
        setattr(distributed, name, counted(name))
    try:
        for spec in (None, CASES["rerope"], CASES["dca"]):
            model = patched(spec)
            layers, heads, kv_heads, dim = 2, 4, 2, 16
            numbers = {"gather": 2 * kv_heads * number, "ulysses": 2 * heads + 2 * max(kv_heads, number)}
            for backend, each in numbers.items():
                expected = layers * batch_size * each * dim * 8 * length * (number - 1) // number**2
                with context_parallel(model, backend=backend) as parallel:
                    received.clear()
                    logits = model(parallel.shard(ids)).logits
                    assert sum(received) == expected, (spec, backend, "forward")
                    received.clear()
                    logits.sum().backward()
                    assert sum(received) == expected, (spec, backend, "backward")
    finally:
        for name, exchange in exchanges.items():
            setattr(distributed, name, exchange)


def dies(rank):
    """In the second layer the last process is killed; the others end with an error that names the lost connection."""
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    model = patched("rerope:window=6")
    if rank == distributed.get_world_size() - 1:
        model.base_model.layers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with context_parallel(model) as parallel, pytest.raises(RuntimeError, match="peer"):
        model(parallel.shard(batch("plain")[0]))


@pytest.mark.nightly
def test_one_killed_among_four_ends_the_others():
    assert run_many(4, dies, seconds=100) == [0, 0, 0, -signal.SIGKILL]


def test_without_processes():
    with pytest.raises(EvaluationError, match="init_process_group"), context_parallel(build()):
        pass


@pytest.mark.nightly
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("backend", ["gather", "ulysses"])
def test_every_scheme(number, backend):
    refused = ("rnn", "shaw", "xl", "deberta", "cope", "fire", "inkling", "urpe") if backend == "ulysses" else ("rnn",)
    specs = [spec for spec in ALL if not any(name in spec.replace(":", "+").split("+") for name in refused)]
    checks = [
        ("scheme_is_exact", spec, kind, backend)
        for spec in specs
        for kind in KINDS
        if kind != "packed" or not get_scheme(spec).regions_by_length  # which refuses texts of several lengths
    ]
    assert run_many(number, in_group, checks, seconds=1500) == [0] * number
