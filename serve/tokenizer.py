"""Text to token ids and back, by the checkpoint's own tokenizer files and chat template (libraries: transformers,
tokenizers, tiktoken, sentencepiece). No code from a checkpoint is run.

What a user types is text: where a message holds the spelling of a special token, such as "<|im_end|>", it is encoded
as plain characters and never becomes the control token. Only raw prompts (no chat template) are taken at their word.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from pallasite.convert.formats.huggingface import read_json
from pallasite.serve.templates import ChatTemplate, built_in_template
from pallasite.serve.tokenizer_bytes import load_internlm2, load_qwen
from pallasite.serve.tokenizer_fast import FastCodec

_PRIVATE_USE = 0xF0000  # first code point of a plane that no text uses
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Codec(Protocol):
    """A vocabulary: ids of texts, text of ids. special: ids of the special tokens by spelling. hidden: ids that
    decoding skips if asked to. names: what templates call special tokens. chat_template: the checkpoint's own."""

    special: Mapping[str, int]
    hidden: frozenset[int]
    eos_ids: tuple[int, ...]
    names: Mapping[str, str]
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which the spellings of special tokens are those tokens. add_special_tokens: with what the
        tokenizer puts around every text, such as <s>."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which they are text."""
        ...

    def encode_rendered(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """As encode, without what is put around; but each character of `stand_ins` is text, the one that it maps to."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; an id that has no token gives nothing, bytes that are no UTF-8 give U+FFFD."""
        ...


class Tokenizer:
    """A vocabulary and its chat template. All methods may be called from any thread."""

    def __init__(self, codec: Codec, template: ChatTemplate | None):
        self._codec, self._template = codec, template
        spellings = sorted(codec.special, key=len, reverse=True)
        self._find_special = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        stops = (codec.special[token] for token in (template.stop_tokens if template else ()))
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*codec.eos_ids, *stops)))
        """Ids that end an answer: the tokenizer's own, and those of a built-in template."""
        self.hidden_ids = codec.hidden
        """Ids that decode() skips if skip_special_tokens is set."""

    @classmethod
    def load(
        cls, folder: Path, config: Mapping[str, Any] = _NOTHING, generation: Mapping[str, Any] = _NOTHING
    ) -> "Tokenizer | None":
        """The tokenizer whose files stand in `folder`; None if there are none. ValueError if they can't be used.

        config, generation: the checkpoint's config.json and generation_config.json, which choose a built-in template
        where the checkpoint carries none. It is used only if the vocabulary has its control tokens.
        """
        codec = _load_codec(folder, config)
        if codec is None:
            return None
        if codec.chat_template:
            return cls(codec, ChatTemplate(codec.chat_template))
        template = built_in_template(config, generation)
        known = template is not None and all(token in codec.special for token in template.stop_tokens)
        return cls(codec, template if known else None)

    @property
    def has_chat_template(self) -> bool:
        """True where encode_chat works."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw text; the spellings of special tokens become those tokens."""
        return self._codec.encode(_whole(text, "the text"), add_special_tokens=add_special_tokens)

    def encode_words(self, word: str) -> list[list[int]]:
        """Ids of a word on its own and after a space, without special tokens."""
        return [self._codec.encode_plain(_whole(text, "the word")) for text in (word, " " + word)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; an id that has no token gives nothing."""
        return self._codec.decode(ids, skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation in OpenAI's form, rendered by the chat template.

        Where the last message is the assistant's, its turn is left open and will be continued; else a new assistant
        turn is opened. Raises ValueError for malformed messages, and for those that the template refuses.
        """
        plain = [_plain_message(i, m) for i, m in enumerate(messages)]
        if not plain:
            raise ValueError("the conversation has no messages")
        if self._template is None:
            raise ValueError("the checkpoint has no chat template; send a text without one (do_preprocess=False)")
        for i, message in enumerate(plain):
            if self._find_special and self._find_special.search(message["role"]):
                raise ValueError(f"message {i} has role {message['role']!r}; a role may not hold a special token")
        typed = self._find_special and any(self._find_special.search(m["content"]) for m in plain)
        stand_ins = self._stand_ins(plain) if typed else {}
        for message in plain:
            for spelling, stand_in in stand_ins.items():
                message["content"] = message["content"].replace(spelling, stand_in)
        text = self._template.render(plain, self._codec.names)
        return self._codec.encode_rendered(text, {v: k for k, v in stand_ins.items()})

    def _stand_ins(self, messages: list[dict[str, str]]) -> dict[str, str]:
        """For each special token's spelling, longest first, a character that no message holds."""
        used = set().union(*(m["content"] for m in messages))
        free = (chr(c) for c in range(_PRIVATE_USE, _PRIVATE_USE + 0xFFFE) if chr(c) not in used)
        return dict(zip(sorted(self._codec.special, key=len, reverse=True), free, strict=False))


def _load_codec(folder: Path, config: Mapping[str, Any]) -> Codec | None:
    """The vocabulary in `folder`; None if there is none."""
    if (folder / "tokenizer.json").exists():
        return FastCodec.load(folder)
    tiktoken_files = sorted(path.name for path in folder.glob("*.tiktoken"))
    if tiktoken_files == ["qwen.tiktoken"]:
        return load_qwen(folder)
    if tiktoken_files:
        raise ValueError(
            f"the tokenizer in {folder} is {', '.join(tiktoken_files)}; of its kind only qwen.tiktoken is known"
        )
    if (folder / "tokenizer.model").exists() and _is_internlm2(folder, config):
        return load_internlm2(folder)
    if any((folder / name).exists() for name in ("tokenizer_config.json", "tokenizer.model")):
        return FastCodec.load(folder)
    return None


def _is_internlm2(folder: Path, config: Mapping[str, Any]) -> bool:
    """By the tokenizer's class; where none is named, by the architecture, which a vision model names in llm_config."""
    path = folder / "tokenizer_config.json"
    name = read_json(path).get("tokenizer_class") if path.exists() else None
    architectures = config.get("llm_config", config).get("architectures") or [""]
    return str(name or architectures[0]).startswith("InternLM2")


def _whole(text: str, what: str) -> str:
    """The text itself. Raises ValueError if it holds half of a surrogate pair, which no encoding can say."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds U+{ord(text[error.start]):04X}, half of a character, at {error.start}"
        ) from None
    return text


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
    return {"role": _whole(role, f"message {index}'s role"), "content": _whole(content, f"message {index}")}
