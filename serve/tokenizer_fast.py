"""Tokenizers that the `tokenizers` library runs: whatever transformers makes of a checkpoint's files without code."""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it announces on stderr that torch is absent

import tokenizers
import transformers

_MARK = "\U0010fffd"  # the last code point of a plane that no text uses


class FastCodec:
    """A fast tokenizer of transformers as a serve.tokenizer.Codec."""

    def __init__(self, hf: transformers.PreTrainedTokenizerFast):
        self._backend: tokenizers.Tokenizer = hf.backend_tokenizer
        self.special: Mapping[str, int] = {t.content: i for i, t in hf.added_tokens_decoder.items() if t.special}
        self.hidden = frozenset(self.special.values())
        self.eos_ids: tuple[int, ...] = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.names: Mapping[str, str] = dict(hf.special_tokens_map)
        templates = hf.chat_template
        self.chat_template: str | None = templates.get("default") if isinstance(templates, dict) else templates
        spellings = sorted(self.special, key=len, reverse=True)
        # A second copy, in which special tokens are spelled as nobody can type them: what is typed is plain text.
        secret = secrets.token_hex(8)
        self._secret = {spelling: f"{_MARK}{secret}-{i}{_MARK}" for i, spelling in enumerate(spellings)}
        self._literal = _rename(self._backend, self._secret)
        self._find_special = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    @classmethod
    def load(cls, folder: Path) -> "FastCodec":
        """From the files in `folder`. Raises ValueError if they can't be used."""
        try:
            hf = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"the tokenizer in {folder} can't be used: {error}") from error
        if not isinstance(hf, transformers.PreTrainedTokenizerFast):
            raise ValueError(f"the tokenizer in {folder} is a {type(hf).__name__}, which has no fast implementation")
        return cls(hf)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See Codec."""
        return _ids(self._backend, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """See Codec."""
        return _ids(self._literal, text)

    def encode_rendered(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """See Codec. Without stand-ins the first copy will do; with them the text goes to the second one, in which the
        spellings that stand in `text` are replaced by the secret ones, and the stand-ins by what was typed."""
        if not stand_ins or self._find_special is None:
            return self.encode(text, add_special_tokens=False)
        text = self._find_special.sub(lambda match: self._secret[match.group()], text)
        table: dict[str, str | int | None] = {**stand_ins}
        return _ids(self._literal, text.translate(str.maketrans(table)))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See Codec."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


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
