"""The tokenizer of all Baichuan checkpoints, on the sentencepiece backend of Transformers 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AddedToken
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from rope_patch.models.baichuan.configuration import BaichuanConfig

USER_TOKEN_ID, ASSISTANT_TOKEN_ID = 195, 196
"""The ids in every published chat model; a folder's `generation_config.json` may override them."""

FIRST_VOCABULARY = 64000  # size of the vocabulary of the first Baichuan; that of Baichuan 2 is twice as large


_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {{- '<user>' + message['content'] -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<assistant>' + message['content'] <eos> -}}
    {%- elif <system> -%}
        {{- message['content'] -}}
    {%- else -%}
        {{- raise_exception('role ' + message['role'] + ' at place ' + loop.index0|string + '; allowed: <roles>') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<assistant>' -}}
{%- endif -%}
"""


class BaichuanTokenizer(SentencePieceBackend):
    """A tokenizer with the pieces of the folder's `tokenizer.model`, and byte fallback.

    Args:
        vocab_file: the `tokenizer.model`.
        unk_token, bos_token, eos_token: special tokens.
        pad_token: default the unknown token, which is id 0.
        add_bos_token, add_eos_token: whether `encode` puts bos before, and eos after each text.
        chat_template: default the template of the folder's generation. Baichuan 2 is recognised by its head if the
            folder has a `config.json`, else by the size of the vocabulary.
        **kwargs: arguments for the tokenizers of Transformers.
    """

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012  # as in every Transformers tokenizer
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
            # as plain strings: published files declare them as whole words, but a chat puts eos directly after a word
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
        config = _read(folder / "generation_config.json")
        roles = config.get("user_token_id", USER_TOKEN_ID), config.get("assistant_token_id", ASSISTANT_TOKEN_ID)
        if max(roles) < self.vocab_size:
            user, assistant = self._roles = tuple(self.convert_ids_to_tokens(index) for index in roles)
            self._update_trie(self._roles)
            if chat_template is None:
                fields, is_second = _read(folder / "config.json"), self.vocab_size > FIRST_VOCABULARY
                if fields.get("model_type") == BaichuanConfig.model_type:
                    is_second = BaichuanConfig(**fields).normalizes_head
                self.chat_template = chat_template_of(user, assistant, is_second)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        # a role may be a control piece only, which sentencepiece never matches in a text
        return [text] if text in self._roles else super()._tokenize(text, **kwargs)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces (`tokens`): bytes become characters again, special tokens stay unchanged."""
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
        """Join `token_ids_0` and, if given, `token_ids_1`, each with bos and eos as configured."""
        before, after = [self.bos_token_id] * self.add_bos_token, [self.eos_token_id] * self.add_eos_token
        return [token for ids in (token_ids_0, token_ids_1) if ids is not None for token in (*before, *ids, *after)]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """Mark special tokens: 1 where `build_inputs_with_special_tokens` adds a token to `token_ids_0` and
        `token_ids_1`, else 0. If a text `already_has_special_tokens`, they are located in it.
        """
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        second = None if token_ids_1 is None else [-1] * len(token_ids_1)
        return [int(token >= 0) for token in self.build_inputs_with_special_tokens([-1] * len(token_ids_0), second)]

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Save like any tokenizer (`save_directory`, `args`, `kwargs`), and also `add_bos_token` and `add_eos_token`,
        which Transformers omits.
        """
        files = super().save_pretrained(save_directory, *args, **kwargs)
        for file in map(Path, files):
            if file.name.endswith("tokenizer_config.json"):
                settings = json.loads(file.read_text(encoding="utf-8"))
                settings |= {"add_bos_token": self.add_bos_token, "add_eos_token": self.add_eos_token}
                file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return files


class BaiChuanTokenizer(BaichuanTokenizer):
    """The tokenizer class under Baichuan-7B's spelling."""


def chat_template_of(user: str, assistant: str, second_generation: bool) -> str:
    """Write a chat template in Jinja: the prompt that the published `chat` method builds, without any bos; `user` and
    `assistant` open a turn.

    Baichuan 2, the second generation, accepts a raw system text at the start and closes no turn. Baichuan accepts no
    system text, and closes the assistant's turns with eos.
    """
    differences = {
        "<user>": user,
        "<assistant>": assistant,
        "<eos>": "" if second_generation else "+ eos_token",
        "<system>": "message['role'] == 'system' and loop.first" if second_generation else "false",
        "<roles>": "system (first), user, assistant" if second_generation else "user, assistant",
    }
    template = _TEMPLATE
    for place, text in differences.items():
        template = template.replace(place, text)
    return template


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
