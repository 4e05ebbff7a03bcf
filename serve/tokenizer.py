"""Text to token ids and back, by the checkpoint's own tokenizer files and chat template (libraries: transformers,
tokenizers, jinja2). No code from a checkpoint is run.

What a user types is text: where a message holds the spelling of a special token, such as "<|im_end|>", it is encoded
as plain characters and never becomes the control token. Only raw prompts (no chat template) are taken at their word.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it announces on stderr that torch is absent

import jinja2
import tokenizers
import transformers

_PRIVATE_USE = 0xF0000  # first code point of a plane that no text uses
_MARK = "\U0010fffd"  # the last code point of another


class Tokenizer:
    """A fast tokenizer and its chat template. All methods may be called from any thread."""

    def __init__(self, hf: transformers.PreTrainedTokenizerFast):
        self._hf = hf
        self._backend: tokenizers.Tokenizer = hf.backend_tokenizer
        spellings = sorted((t.content for t in hf.added_tokens_decoder.values() if t.special), key=len, reverse=True)
        # A second copy, in which special tokens are spelled as nobody can type them: what is typed is plain text.
        secret = secrets.token_hex(8)
        self._secret = {spelling: f"{_MARK}{secret}-{i}{_MARK}" for i, spelling in enumerate(spellings)}
        self._literal = _rename(self._backend, self._secret)
        self._find_special = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer whose files stand in `folder`; None if there are none. ValueError if they can't be used."""
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            return None
        try:
            hf = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"the tokenizer in {folder} can't be used: {error}") from error
        if not isinstance(hf, transformers.PreTrainedTokenizerFast):
            raise ValueError(f"the tokenizer in {folder} is a {type(hf).__name__}, which has no fast implementation")
        return cls(hf)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence id, if it has one."""
        return () if self._hf.eos_token_id is None else (int(self._hf.eos_token_id),)

    @property
    def has_chat_template(self) -> bool:
        """True where encode_chat works."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw text; the spellings of special tokens become those tokens."""
        return _ids(self._backend, text, add_special_tokens)

    def encode_words(self, word: str) -> list[list[int]]:
        """Ids of a word on its own and after a space, without special tokens."""
        return [_ids(self._literal, text) for text in (word, " " + word)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; an id that has no token gives nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation in OpenAI's form, rendered by the checkpoint's chat template.

        Where the last message is the assistant's, its turn is left open and will be continued; else a new assistant
        turn is opened. Raises ValueError for malformed messages, and for those that the template refuses.
        """
        plain = [_plain_message(i, m) for i, m in enumerate(messages)]
        if not plain:
            raise ValueError("the conversation has no messages")
        if not self.has_chat_template:
            raise ValueError("the checkpoint has no chat template; send a text without one (do_preprocess=False)")
        for i, message in enumerate(plain):
            if self._find_special and self._find_special.search(message["role"]):
                raise ValueError(f"message {i} has role {message['role']!r}; a role may not hold a special token")
        typed = self._find_special and any(self._find_special.search(m["content"]) for m in plain)
        stand_ins = self._stand_ins(plain) if typed else {}
        for message in plain:
            for spelling, stand_in in stand_ins.items():
                message["content"] = message["content"].replace(spelling, stand_in)
        going_on = plain[-1]["role"] == "assistant"
        try:
            text = self._hf.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=not going_on, continue_final_message=going_on
            )
        except (jinja2.TemplateError, ValueError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        if not stand_ins:
            return self.encode(text, add_special_tokens=False)
        return self._encode_rendered(text, {v: k for k, v in stand_ins.items()})

    def _stand_ins(self, messages: list[dict[str, str]]) -> dict[str, str]:
        """For each special token's spelling a character that no message holds."""
        used = set().union(*(m["content"] for m in messages))
        free = (chr(c) for c in range(_PRIVATE_USE, _PRIVATE_USE + 0xFFFE) if chr(c) not in used)
        return dict(zip(self._secret, free, strict=False))

    def _encode_rendered(self, text: str, literal: Mapping[str, str]) -> list[int]:
        """Encode a rendered conversation: special tokens that the template wrote are tokens; stand-ins become the
        spelling that the user typed."""
        assert self._find_special is not None
        text = self._find_special.sub(lambda match: self._secret[match.group()], text)
        table: dict[str, str | int | None] = {**literal}
        return _ids(self._literal, text.translate(str.maketrans(table)))


def _ids(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    # Not encode(): that holds the interpreter's lock, and a text of megabytes would stop the engine for seconds.
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


def _rename(tokenizer: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """A copy in which the tokens `names` are spelled as its values say; it adds no special tokens."""
    spec = json.loads(tokenizer.to_str())
    model = spec["model"]
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["post_processor"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, str]:
    """role and content as text; content may be a list of text parts."""
    if not isinstance(message, Mapping):
        raise ValueError(f"message {index} is a {type(message).__name__}; it must be a dict with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {index} has role {role!r}; it must be a text such as 'user'")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in content]
        if any(not isinstance(t, str) for t in texts):
            raise ValueError(f"message {index} has content parts that are not text; this model takes text only")
        content = "".join(t for t in texts if t is not None)
    if not isinstance(content, str):
        raise ValueError(f"message {index} ({role}) has content {content!r}; it must be a text")
    return {"role": role, "content": content}
