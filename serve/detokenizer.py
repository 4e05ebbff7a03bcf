"""Token ids to text as they come: whole characters only, and nothing of a stop word.

A token may hold part of a character, and its text may depend on the token before it (a leading space). So text is the
difference of two decodings of a short window, and replacement characters at its end are held back: they may be the
first bytes of a character.
"""

from collections import defaultdict
from collections.abc import Sequence

from pallasite.serve.tokenizer import Tokenizer

CONTEXT_TOKENS = 6
"""Prompt tokens that the first decoded tokens are seen together with."""
MAX_HELD_TOKENS = 16
"""A character has at most four bytes: what is still incomplete after so many tokens is no text, and is let go."""
MAX_CHARACTER_TOKENS = 4
"""Tokens that one character may be spread over: bytes in UTF-8."""


class Detokenizer:
    """Text of one answer, piece by piece.

    The window is ids[start:]. ids[start:read] have been given out and are its context; of the window's text the first
    `shown` characters have been given out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        context = self._decode(0, len(self._ids))
        if context.endswith("\ufffd"):
            self._ids, context = [], ""  # a prompt cut inside a character: its tail is no context
        self._start, self._read, self._shown = 0, len(self._ids), len(context)

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; "" while a character is unfinished."""
        if self._skip and token_id in self._tokenizer.hidden_ids:
            return ""
        self._ids.append(token_id)
        end = len(self._ids)
        text = self._decode(self._start, end)
        certain = text.rstrip("\ufffd")
        if len(certain) < len(text) and end - self._read > MAX_HELD_TOKENS:
            return self._let_go(end - MAX_CHARACTER_TOKENS + 1)
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if new and len(certain) == len(text):
            self._start, self._read = self._read, end
            self._shown = len(self._decode(self._start, end))
        return new

    def finish(self) -> str:
        """What is still held back: at most an incomplete character, of which one U+FFFD is left."""
        text = self._decode(self._start, len(self._ids))[self._shown :]
        self._start = self._read = len(self._ids)
        self._shown = 0
        # Where bytes are tokens of their own, one cut character may turn a whole run of bytes into replacements.
        whole = text.rstrip("\ufffd")
        return text[: len(whole) + 1]

    def _let_go(self, end: int) -> str:
        """Give out the text up to ids[end], incomplete as it is; what follows is a window of its own."""
        text = self._decode(self._start, end)[self._shown :]
        self._start = self._read = end
        self._shown = 0
        return text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)


class StopWords:
    """Finds the stop word that ends first in a stream of text, and holds back what may become one."""

    def __init__(self, words: Sequence[str], include: bool):
        self._words, self._include = list(words), include
        self._longest = max((len(w) for w in words), default=0)
        self._by_first: dict[str, list[str]] = defaultdict(list)
        for word in words:
            self._by_first[word[0]].append(word)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain, whether a stop word was found): with one, the text before it (or up to its end)."""
        buffer = self._held + text
        # The word that ends first, and of those the longest: so it is found wherever the pieces are cut.
        found = min(((buffer.find(w) + len(w), buffer.find(w)) for w in self._words if w in buffer), default=None)
        if found:
            self._held = ""
            end, start = found
            return buffer[: end if self._include else start], True
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def release(self, text: str = "") -> str:
        """All that was held back, and `text` after it, unsearched."""
        held, self._held = self._held, ""
        return held + text

    def _possible_start(self, buffer: str) -> int:
        """Index of the longest tail of `buffer` that a stop word begins with; its length if there is none."""
        for i in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if any(word.startswith(buffer[i:]) for word in self._by_first.get(buffer[i], ())):
                return i
        return len(buffer)


class AnswerText:
    """A request's text stream (serve.types.TextStream): a detokenizer, then the stop words."""

    def __init__(self, detokenizer: Detokenizer, stop_words: StopWords):
        self._detokenizer, self._stop_words = detokenizer, stop_words
        self._stopped = False

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, bool]:
        """The text that is certain with this token, and whether a stop word ends the answer here. While may_stop is
        False stop words are ordinary text."""
        text = self._detokenizer.push(token_id)
        if not may_stop:
            return self._stop_words.release(text), False
        text, self._stopped = self._stop_words.push(text)
        return text, self._stopped

    def finish(self) -> str:
        """The text held back until now; nothing after a stop word."""
        return "" if self._stopped else self._stop_words.release(self._detokenizer.finish())
