"""The tokenizer of all Baichuan checkpoints, on the sentencepiece backend of Transformers 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AddedToken
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from rope_patch.models.baichuan.chat import chat_template as template_of
from rope_patch.models.baichuan.configuration import BaichuanConfig

USER_TOKEN_ID, ASSISTANT_TOKEN_ID = 195, 196
"""Of every published chat model; a folder's `generation_config.json` may say others."""

FIRST_VOCABULARY = 64000
"""Size of the vocabulary of the first Baichuan; that of Baichuan 2 is twice as large."""


class BaichuanTokenizer(SentencePieceBackend):
    """Pieces of the folder's `tokenizer.model`, with byte fallback.

    Args:
        vocab_file: the `tokenizer.model`.
        unk_token, bos_token, eos_token: special tokens.
        pad_token: default the unknown token, which is id 0.
        add_bos_token, add_eos_token: whether `encode` puts bos before, and eos after each text.
        chat_template: default that of the generation of the folder. Baichuan 2 is told by the rule of its head where
            `config.json` lies beside the vocabulary, else by the size of the vocabulary.
        **kwargs: for the tokenizers of Transformers.
    """

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012  # as every tokenizer of Transformers says it
    model_input_names = ("input_ids", "attention_mask")

    def __init__(
        self,
        vocab_file: str,
        unk_token: str | AddedToken = "<unk>",
        bos_token: str | AddedToken = "<s>",
        eos_token: str | AddedToken = "</s>",
        pad_token: str | AddedToken | None = None,
        add_bos_token: bool = True,
        add_eos_token: bool = False,
        chat_template: str | dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.add_bos_token = add_bos_token
        self.add_eos_token = add_eos_token
        self._roles: tuple[str, ...] = ()
        super().__init__(
            vocab_file=vocab_file,
            # as text: published files declare them as whole words, but a chat puts eos right behind a word
            unk_token=str(unk_token),
            bos_token=str(bos_token),
            eos_token=str(eos_token),
            pad_token=str(unk_token if pad_token is None else pad_token),
            added_tokens_decoder={
                index: AddedToken(str(token), special=True) if token.special else token
                for index, token in kwargs.pop("added_tokens_decoder", {}).items()
            },
            add_bos_token=add_bos_token,
            add_eos_token=add_eos_token,
            chat_template=chat_template,
            **kwargs,
        )
        folder = Path(vocab_file).parent
        said = _read(folder / "generation_config.json")
        roles = said.get("user_token_id", USER_TOKEN_ID), said.get("assistant_token_id", ASSISTANT_TOKEN_ID)
        if max(roles) < self.vocab_size:
            user, assistant = self._roles = tuple(self.convert_ids_to_tokens(index) for index in roles)
            self._update_trie(self._roles)
            if chat_template is None:
                self.chat_template = template_of(user, assistant, _is_second_generation(folder, self.vocab_size))

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        # the model may know a role only as a control piece, which it never finds in a text
        return [text] if text in self._roles else super()._tokenize(text, **kwargs)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of pieces (`tokens`): bytes become characters again, and special tokens stand as they are."""
        verbatim = {*self.all_special_tokens, *self._added_tokens_encoder, *self._roles}
        text = ""
        run: list[str] = []
        for token in tokens:
            if token in verbatim:
                text, run = text + self.sp_model.decode(run) + token, []
            else:
                run.append(token)
        return text + self.sp_model.decode(run)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """`token_ids_0` and, where given, `token_ids_1`, each between the bos and the eos that are asked for."""
        before, after = [self.bos_token_id] * self.add_bos_token, [self.eos_token_id] * self.add_eos_token
        return [token for ids in (token_ids_0, token_ids_1) if ids is not None for token in (*before, *ids, *after)]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """1 where `build_inputs_with_special_tokens` adds a token to `token_ids_0` and `token_ids_1`, else 0; where a
        text `already_has_special_tokens`, they are looked for.
        """
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        second = None if token_ids_1 is None else [-1] * len(token_ids_1)
        return [int(token >= 0) for token in self.build_inputs_with_special_tokens([-1] * len(token_ids_0), second)]

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """As every tokenizer is saved (`save_directory`, `args`, `kwargs`), and with `add_bos_token` and
        `add_eos_token`, which Transformers leaves out.
        """
        files = super().save_pretrained(save_directory, *args, **kwargs)
        for file in map(Path, files):
            if file.name.endswith("tokenizer_config.json"):
                said = json.loads(file.read_text(encoding="utf-8"))
                said |= {"add_bos_token": self.add_bos_token, "add_eos_token": self.add_eos_token}
                file.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return files


class BaiChuanTokenizer(BaichuanTokenizer):
    """The spelling of Baichuan-7B."""


def _is_second_generation(folder: Path, vocab_size: int) -> bool:
    said = _read(folder / "config.json")
    if said.get("model_type") == BaichuanConfig.model_type:
        return BaichuanConfig(**said).normalizes_head
    return vocab_size > FIRST_VOCABULARY


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
