from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rope_patch
from rope_patch.evaluation.run import run
from rope_patch.evaluation.tasks.perplexity import Perplexity
from rope_patch.mounting.parameters import learned_parameters

TRAINING_LENGTH = 16


def measure(model, tokenizer, corpus, schemes, lengths, results=None, name=None, trained=None, **settings):
    """Rows of perplexity."""
    task = Perplexity(tokenizer, corpus, **settings)
    return run(model, task, schemes, lengths, results, name=name, trained=trained)


def byte_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte; with `bos`, a start-of-text token in front of every text."""
    from tokenizers.processors import TemplateProcessing

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, **{letter: i for i, letter in enumerate(letters, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=TRAINING_LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)  # far from uniform predictions, so that a wrong row shows
    return model.eval()


def documents(*lengths: int) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"name": f"d{i}", "text": "".join(chr(97 + int(c)) for c in torch.randint(26, (n,), generator=generator))}
        for i, n in enumerate(lengths)
    ]


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def folder_of_texts(path, *lengths):
    """A folder with a text of each length."""
    path.mkdir()
    for document in documents(*lengths):
        (path / f"{document['name']}.txt").write_text(document["text"])
    return path


@pytest.fixture
def saved(checkpoint, tmp_path):
    """The checkpoint, saved under YaRN."""
    return _saved_under("yarn:factor=4", checkpoint, tmp_path / "saved")


LEARNED = "rope+kerple:initial_scale=1"


@pytest.fixture
def trained(checkpoint, tmp_path):
    """The checkpoint, saved under `LEARNED` with other values than it starts from."""
    return _saved_under(LEARNED, checkpoint, tmp_path / "trained")


def _saved_under(spec, checkpoint, folder):
    model = rope_patch.from_pretrained(checkpoint)
    rope_patch.patch(model, spec)
    with torch.no_grad():
        for value in learned_parameters(model).values():
            value.mul_(3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
