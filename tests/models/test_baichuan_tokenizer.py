"""The tokenizer against sentencepiece itself, and the chats against the ids that the published code builds."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import sentencepiece
from transformers import AutoTokenizer

from rope_patch.models.baichuan import register_baichuan
from rope_patch.models.baichuan.tokenization import BaichuanTokenizer
from tests.models.baichuan_folders import VARIANTS, write_folder

USER, ASSISTANT, EOS = 195, 196, 2

TEXTS = [
    "hello world",
    "  two leading, two inside  and two trailing  ",
    "线\n性 偏置和旋转位置编码。",
    "a line\n\n\tand a tab",
    "bytes: \U0001f98b é ẞ \U0001d538",
    "12345",
    "",
]

SPECIAL = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": True}


@functools.cache
def tokenizer_model(roles_are_control: bool) -> bytes:
    """A tiny model with the settings of the published ones, and the roles at their published ids."""
    reserved = [f"<reserved_{index}>" for index in range(200)]
    corpus = ["hello world, a line and a tab", "旋转位置编码 和 线性偏置。", "two leading and two trailing 12345"] * 40
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=written,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
        **{"control_symbols" if roles_are_control else "user_defined_symbols": reserved},
    )
    return written.getvalue()


def write_tokenizer(
    folder: Path, roles_are_control: bool = False, **changes: Any
) -> sentencepiece.SentencePieceProcessor:
    """The tokenizer files of a published folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(tokenizer_model(roles_are_control))
    special = {name: {**SPECIAL, "content": text} for name, text in [("bos_token", "<s>"), ("eos_token", "</s>")]}
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]},
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "sp_model_kwargs": {},
        "tokenizer_class": "BaichuanTokenizer",
        "unk_token": {**SPECIAL, "content": "<unk>"},
        **special,
        **changes,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    named = {name: {key: value for key, value in token.items() if key != "__type"} for name, token in special.items()}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model(roles_are_control))


def load(folder: Path, **options: Any) -> Any:
    register_baichuan()
    return AutoTokenizer.from_pretrained(folder, **options)


@pytest.mark.parametrize("trusted", [None, False, True])
@pytest.mark.parametrize("spelling", ["BaichuanTokenizer", "BaiChuanTokenizer"])
def test_the_native_class_is_taken(tmp_path, trusted, spelling):
    write_folder(tmp_path, VARIANTS["baichuan_13b"])
    write_tokenizer(tmp_path, tokenizer_class=spelling)
    tokenizer = load(tmp_path, trust_remote_code=trusted)
    assert isinstance(tokenizer, BaichuanTokenizer)
    assert type(tokenizer).__name__ == spelling
    assert not (tmp_path / "remote_code_ran").exists()


def test_a_folder_that_names_no_class_is_loaded_too(tmp_path):
    write_folder(tmp_path, VARIANTS["baichuan_13b"])
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["tokenizer_class"], config["auto_map"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert isinstance(load(tmp_path), BaichuanTokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_sentencepiece_and_come_back(tmp_path, text):
    model = write_tokenizer(tmp_path)
    tokenizer = BaichuanTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert ids == model.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == ids


@pytest.mark.parametrize("saved_later", [False, True])
def test_special_tokens_stand_in_texts_also_behind_a_word(tmp_path, saved_later):
    # as Transformers 4.34 and later saved them again
    words = {
        str(index): {**SPECIAL, "content": text, "special": True} for index, text in enumerate(["<unk>", "<s>", "</s>"])
    }
    write_tokenizer(tmp_path, **({"added_tokens_decoder": words} if saved_later else {}))
    tokenizer = BaichuanTokenizer.from_pretrained(tmp_path)
    ids = [1, *tokenizer.encode(" hello"), 2, *tokenizer.encode("旋转")]
    assert tokenizer.decode(ids) == "<s> hello</s>旋转"
    assert tokenizer.decode(ids, skip_special_tokens=True) == " hello旋转"
    assert tokenizer.encode("<s> hello</s>旋转") == ids


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_bos_and_eos_are_added_as_the_folder_says(tmp_path, bos, eos):
    model = write_tokenizer(tmp_path / "original", add_bos_token=bos, add_eos_token=eos)
    tokenizer = BaichuanTokenizer.from_pretrained(tmp_path / "original")
    frame = [1] * bos, [2] * eos
    plain = model.encode("hello world")
    assert tokenizer("hello world").input_ids == [*frame[0], *plain, *frame[1]]
    pair = tokenizer("hello world", "hello").input_ids
    assert pair == [*frame[0], *plain, *frame[1], *frame[0], *model.encode("hello"), *frame[1]]
    assert tokenizer("hello world", add_special_tokens=False).input_ids == plain
    assert tokenizer.get_special_tokens_mask(plain) == [*[1] * bos, *[0] * len(plain), *[1] * eos]
    tokenizer.save_pretrained(tmp_path / "saved")
    again = BaichuanTokenizer.from_pretrained(tmp_path / "saved")
    assert again("hello world").input_ids == tokenizer("hello world").input_ids


def test_a_folder_is_saved_as_it_was(tmp_path):
    write_tokenizer(tmp_path / "original")
    tokenizer = load(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "saved")
    files = [tmp_path / name / "tokenizer.model" for name in ("original", "saved")]
    assert files[0].read_bytes() == files[1].read_bytes()
    again = load(tmp_path / "saved")
    assert isinstance(again, BaichuanTokenizer)
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.model_max_length == 4096
    assert again.chat_template == tokenizer.chat_template
    assert [again(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]


def test_the_pad_is_unk_where_none_is_given(tmp_path):
    write_tokenizer(tmp_path / "none")
    write_tokenizer(tmp_path / "given", pad_token="</s>")
    assert BaichuanTokenizer.from_pretrained(tmp_path / "none").pad_token_id == 0
    assert BaichuanTokenizer.from_pretrained(tmp_path / "given").pad_token_id == 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_on_either_side(tmp_path, side):
    model = write_tokenizer(tmp_path)
    tokenizer = BaichuanTokenizer.from_pretrained(tmp_path, padding_side=side)
    texts = ["hello", "hello world, two"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    for text, ids, mask in zip(texts, batch.input_ids, batch.attention_mask, strict=True):
        expected = model.encode(text)
        kept = slice(-len(expected), None) if side == "left" else slice(0, len(expected))
        assert ids[kept].tolist() == expected
        assert mask.sum() == len(expected)
        assert (ids[mask == 0] == 0).all()


CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": " two"},
    {"role": "user", "content": "旋转"},
]


def chat_ids(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("roles_are_control", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("bos", [False, True])
def test_a_chat_is_built_as_published(tmp_path, name, roles_are_control, bos):
    write_folder(tmp_path, VARIANTS[name])
    model = write_tokenizer(tmp_path, roles_are_control, add_bos_token=bos)
    tokenizer = load(tmp_path)
    hello, two, turn = (model.encode(message["content"]) for message in CHAT)
    closed = [] if VARIANTS[name].norm_head else [EOS]
    expected = [USER, *hello, ASSISTANT, *two, *closed, USER, *turn]
    assert chat_ids(tokenizer, CHAT) == expected
    assert chat_ids(tokenizer, CHAT, add_generation_prompt=True) == [*expected, ASSISTANT]


def test_a_system_text_comes_first_and_raw_in_the_second_generation(tmp_path):
    write_folder(tmp_path, VARIANTS["baichuan2_7b"])
    model = write_tokenizer(tmp_path)
    system = {"role": "system", "content": "a line and"}
    expected = [*model.encode("a line and"), USER, *model.encode("hello")]
    assert chat_ids(load(tmp_path), [system, CHAT[0]]) == expected
    with pytest.raises(jinja2.TemplateError, match="role system at place 1; allowed: system"):
        chat_ids(load(tmp_path), [CHAT[0], system])


def test_the_first_generation_knows_no_system_text(tmp_path):
    write_folder(tmp_path, VARIANTS["baichuan_13b"])
    write_tokenizer(tmp_path)
    with pytest.raises(jinja2.TemplateError, match="role system at place 0; allowed: user, assistant"):
        chat_ids(load(tmp_path), [{"role": "system", "content": "a"}, *CHAT])


def test_a_chat_template_of_the_folder_wins(tmp_path):
    write_tokenizer(tmp_path, chat_template="{{ messages[0]['content'] }}")
    tokenizer = BaichuanTokenizer.from_pretrained(tmp_path)
    assert chat_ids(tokenizer, CHAT) == tokenizer.encode("hello")


def test_the_roles_of_the_generation_config_win(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"user_token_id": 10, "assistant_token_id": 11}')
    tokenizer = BaichuanTokenizer.from_pretrained(tmp_path)
    assert chat_ids(tokenizer, CHAT[:1], add_generation_prompt=True) == [10, *tokenizer.encode("hello"), 11]
