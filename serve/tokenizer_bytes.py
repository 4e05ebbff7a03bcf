"""Tokenizers in which every token is a string of bytes: first-generation Qwen's and InternLM2's.

Both are published as Python files beside the weights, which are never run; the libraries that those files call are
used directly: `tiktoken` on qwen.tiktoken, `sentencepiece` on tokenizer.model. (transformers can make a fast tokenizer
of the latter, but not quite the same one: it gives the NUL character its piece, where sentencepiece gives bytes.)
"""

import base64
import binascii
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from pallasite.convert.formats.huggingface import read_json

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut before bytes are merged."""
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
"""Their ids follow the ranks of the file."""

LONG_SPACE = re.compile(r"\s{100000}(?=\s)")
"""tiktoken's regular expression overflows its stack at runs of a million; a longer run is cut after so many."""

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
"""Types of pieces in sentencepiece_model.proto."""


class ByteCodec:
    """A serve.tokenizer.Codec over a function that encodes plain text and a table of what each token decodes to.

    encode: ids of a text without special tokens; normalize: what is done to a text before. tokens: bytes by id.
    special: ids by spelling; a token may have several. hidden: those that decoding may skip. bos: the id that starts
    every sequence, if any. names: what templates call special tokens.
    """

    def __init__(
        self,
        *,
        encode: Callable[[str], list[int]],
        tokens: Mapping[int, bytes],
        special: Mapping[str, int],
        hidden: frozenset[int],
        bos: int | None,
        eos: int,
        names: Mapping[str, str],
        chat_template: str | None,
        normalize: Callable[[str], str] = str,
    ):
        self._encode, self._tokens, self._bos, self._normalize = encode, tokens, bos, normalize
        self.special, self.hidden = special, hidden
        self.eos_ids: tuple[int, ...] = (eos,)
        self.names, self.chat_template = names, chat_template
        spellings = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, spellings))})")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See Codec."""
        start = [self._bos] if add_special_tokens and self._bos is not None else []
        return [*start, *self.encode_rendered(self._normalize(text), {})]

    def encode_plain(self, text: str) -> list[int]:
        """See Codec."""
        return self._encode(self._normalize(text))

    def encode_rendered(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """See Codec."""
        table = str.maketrans(dict(stand_ins))
        ids: list[int] = []
        for part in self._split.split(text):
            if part in self.special:
                ids.append(self.special[part])
            elif part:
                ids += self.encode_plain(part.translate(table))
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Codec."""
        skipped = self.hidden if skip_special_tokens else frozenset()
        data = b"".join(self._tokens.get(i, b"") for i in ids if i not in skipped)
        return data.decode("utf-8", errors="replace")


def load_qwen(folder: Path) -> ByteCodec:
    """First-generation Qwen's tokenizer from qwen.tiktoken: a base64 string and its rank on each line.

    Raises ValueError naming the file and what is wrong with it.
    """
    path = folder / "qwen.tiktoken"
    ranks = dict(_ranks(path))
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
        raise ValueError(f"{path}: the ranks must be 0, 1, 2, ..., each once, and every single byte must have one")
    special = {spelling: len(ranks) + i for i, spelling in enumerate(QWEN_SPECIAL)}
    encoding = tiktoken.Encoding("qwen", pat_str=QWEN_SPLIT, mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> list[int]:
        cuts = [0, *(match.end() for match in LONG_SPACE.finditer(text)), len(text)]
        parts = (text[start:end] for start, end in itertools.pairwise(cuts))
        return [i for part in parts for i in encoding.encode_ordinary(part)]

    return ByteCodec(
        encode=encode,
        tokens={rank: token for token, rank in ranks.items()} | {i: s.encode() for s, i in special.items()},
        special=special,
        hidden=frozenset(special.values()),
        bos=None,
        eos=special["<|endoftext|>"],
        names={"eos_token": "<|endoftext|>"},
        chat_template=_chat_template(folder),
        normalize=lambda text: unicodedata.normalize("NFC", text),
    )


def load_internlm2(folder: Path) -> ByteCodec:
    """InternLM2's tokenizer from tokenizer.model and the special tokens that tokenizer_config.json or added_tokens.json
    name. Some of these take the id of a reserved piece, such as [UNUSED_TOKEN_145], whose spelling is theirs as well.

    Raises ValueError naming the file and what is wrong with it.
    """
    path = folder / "tokenizer.model"
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path}: not a sentencepiece model ({error})") from None
    rule = model.normalizer_spec
    if rule.add_dummy_prefix or rule.remove_extra_whitespaces or rule.precompiled_charsmap:
        raise ValueError(f"{path}: not InternLM2's: it changes the text before encoding ({rule.name or 'unnamed'})")
    added = dict(_added_tokens(folder))
    tokens, special, hidden = {}, {}, set()
    for i, piece in enumerate(model.pieces):
        if piece.type in (UNKNOWN, CONTROL) or i in added:
            special[piece.piece] = i
            hidden.add(i)
            tokens[i] = piece.piece.encode()
        elif piece.type == BYTE:
            tokens[i] = bytes([int(piece.piece[3:5], 16)])
        else:
            tokens[i] = piece.piece.replace("▁", " ").encode()
        # Typed text never becomes a special token; and sentencepiece warns of NUL before it does the same.
        if (i in added and piece.type not in (UNKNOWN, CONTROL)) or piece.piece == "\0":
            piece.type = UNUSED
    for i, (spelling, is_special) in added.items():
        special[spelling] = i
        tokens[i] = spelling.encode()
        hidden = hidden | {i} if is_special else hidden - {i}
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    settings = _settings(folder)
    names = {}
    for role, default in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")):
        value = settings.get(role) or default
        names[role] = value["content"] if isinstance(value, dict) else value
        if names[role] not in special:
            raise ValueError(f"{folder}: {role} is {names[role]!r}, which is no special token of the tokenizer")
    return ByteCodec(
        encode=processor.encode,
        tokens=tokens,
        special=special,
        hidden=frozenset(hidden),
        bos=special[names["bos_token"]] if settings.get("add_bos_token", True) else None,
        eos=special[names["eos_token"]],
        names=names,
        chat_template=_chat_template(folder),
    )


def _ranks(path: Path) -> Iterator[tuple[bytes, int]]:
    """(token, rank) of each line. Raises ValueError naming the line that is no such thing."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            yield base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}: line {number} is no base64 string with its rank") from None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def _added_tokens(folder: Path) -> Iterator[tuple[int, tuple[str, bool]]]:
    """(id, (spelling, whether it is special)) of the tokens that were added to a vocabulary."""
    named = _settings(folder).get("added_tokens_decoder")
    if named is None:
        path = folder / "added_tokens.json"
        spellings = read_json(path) if path.exists() else {}
        named = {i: {"content": spelling, "special": True} for spelling, i in spellings.items()}
    try:
        for i, token in named.items():
            if not token["content"]:
                raise ValueError("a token without text")
            yield int(i), (token["content"], bool(token.get("special")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: the table of added tokens is malformed ({error})") from None


def _chat_template(folder: Path) -> str | None:
    """The checkpoint's own, from a file of its own or tokenizer_config.json; of several the one named "default"."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = _settings(folder).get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
