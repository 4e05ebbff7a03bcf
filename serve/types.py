"""The nouns of serving: GenerationConfig, Request, Sequence, StepOutput, Response. Read this file first."""

import dataclasses
import enum
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_STOP_IDS = 32
MAX_BAD_IDS = 32
MAX_STOP_WORDS = 1024


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How one request is generated. Names follow LMDeploy's; every field is checked when the object is made.

    max_new_tokens: most tokens to generate. do_sample: False decodes greedily. temperature: 0 is greedy too. top_p,
    top_k (0 and -1: all tokens), min_p: what may be sampled. repetition_penalty divides (multiplies, if negative) the
    logits of tokens seen in the prompt or the output; presence_penalty and frequency_penalty are subtracted for tokens
    of the output, once and for each occurrence. Penalties act in greedy decoding too. random_seed: the same seed gives
    the same tokens whatever else is in the batch; None draws one. stop_words: texts that end the answer, across token
    borders. stop_token_ids: tokens that end it. bad_words: texts of a single token that are never generated.
    ignore_eos: go on past the model's end-of-sequence tokens. min_new_tokens: neither end-of-sequence, nor stop tokens,
    nor stop words end the answer before. skip_special_tokens: leave special tokens out of the text. logprobs: report
    the chosen token's log-probability and those of that many most likely tokens, by the model's own distribution
    (before penalties, temperature and filters). include_stop_str_in_output: keep the stop word in the text. n: answers
    to each prompt, each with its own noise.
    """

    max_new_tokens: int = 512
    do_sample: bool = False
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    random_seed: int | None = None
    stop_words: Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    bad_words: Seq[str] | None = None
    ignore_eos: bool = False
    min_new_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        self._integer("max_new_tokens", 1, 2**31 - 1)
        self._integer("top_k", -1, 2**31 - 1)
        self._integer("min_new_tokens", 0, self.max_new_tokens)
        self._integer("n", 1, 128)
        if self.logprobs is not None:
            self._integer("logprobs", 0, MAX_LOGPROBS)
        if self.random_seed is not None:
            self._integer("random_seed", 0, 2**64 - 1)
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        # Below 1 it encourages repetition. The bounds keep products with a logit inside float32.
        self._number("repetition_penalty", 1e-6, 1e6)
        self._number("presence_penalty", -100.0, 100.0)
        self._number("frequency_penalty", -100.0, 100.0)
        for name in ("do_sample", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        self._words("stop_words", MAX_STOP_WORDS)
        self._words("bad_words", MAX_BAD_IDS)
        ids = self.stop_token_ids
        if ids is not None:
            if not isinstance(ids, list | tuple | np.ndarray) or len(ids) > MAX_STOP_IDS:
                raise ValueError(f"stop_token_ids must be a list of at most {MAX_STOP_IDS} token ids")
            for i in ids:
                if isinstance(i, bool) or not isinstance(i, int | np.integer) or i < 0:
                    raise ValueError(f"stop_token_ids holds {i!r}; token ids are integers from 0")

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}; it must be an integer in {low}..{high}")

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        right = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if not right or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
            raise ValueError(f"{name} is {value!r}; it must be a number in {interval}")

    def _words(self, name: str, most: int) -> None:
        words = getattr(self, name)
        if words is None:
            return
        if not isinstance(words, list | tuple) or len(words) > most:
            raise ValueError(f"{name} must be a list of at most {most} texts")
        for word in words:
            if not isinstance(word, str) or not word:
                raise ValueError(f"{name} holds {word!r}; each must be a text that is not empty")

    @property
    def greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return not self.do_sample or self.temperature == 0


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one generated token: the chosen one's, and those of the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a request's caller is told after a step. Deltas: joined, they are the whole answer.

    finish_reason is None until the last output. error says why where it is "error". cached_tokens: prompt tokens whose
    K and V were found in the prefix cache. scores: of a scoring request, see Request.score.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    scores: np.ndarray | None = None


class TextStream(Protocol):
    """Turns one request's tokens into text as they come; serve/detokenizer.py."""

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, bool]:
        """The text that is certain with this token, and whether a stop word ends the answer here."""
        ...

    def finish(self) -> str:
        """The text held back until now; empty after a stop word."""
        ...


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt in token ids and how to answer it. emit is called from the engine's thread with each StepOutput, and
    must neither block nor raise. stop_ids and bad_ids are already resolved (end-of-sequence included).

    score: instead of generating, return for every prompt position float32 "logits" [L, vocab] or "nll" [L - 1], the
    negative log-likelihood of the next token.
    """

    id: str
    prompt: Seq[int]
    config: GenerationConfig
    emit: Callable[[StepOutput], None]
    stop_ids: tuple[int, ...] = ()
    bad_ids: tuple[int, ...] = ()
    seed: int = 0
    text: TextStream | None = None
    score: Literal["logits", "nll"] | None = None


class Phase(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request in the engine: its tokens and what it holds.

    tokens: prompt and all generated tokens that the host has read. end: total tokens at which it stops for length.
    order: arrival, for fairness. pages, slot: held on the device; known_pages: of them, those that the device's page
    table lists. prefilled: tokens whose K and V are written by launches made so far. position: the place of the next
    token that decode will write, counting the launches in flight. reused: prompt tokens found in the prefix cache on
    admission. scored: parts of a scoring request's result.
    """

    request: Request
    tokens: list[int]
    prompt_len: int
    end: int
    order: int
    phase: Phase = Phase.WAITING
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    known_pages: int = 0
    prefilled: int = 0
    position: int = 0
    reused: int | None = None
    scored: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def generated(self) -> int:
        """Tokens generated and read so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def steps_left(self) -> int:
        """Decode steps that may still be launched before the length limit."""
        return self.end - 1 - self.position


@dataclasses.dataclass(frozen=True)
class Response:
    """The answer to one prompt, or a piece of it when streaming. index: the prompt's place in the list; choice: which
    of its n answers."""

    text: str = ""
    generate_token_len: int = 0
    input_token_len: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    index: int = 0
    choice: int = 0
    error: str | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        tail = f", error={self.error!r}" if self.error else ""
        return (
            f"Response(index={self.index}, text={text!r}, finish_reason={self.finish_reason!r}, "
            f"tokens={self.input_token_len}+{self.generate_token_len}{tail})"
        )


class QueueFull(RuntimeError):
    """The engine's queue of waiting requests is full."""


class EngineClosed(RuntimeError):
    """The engine was closed, or its thread died; no request can be answered any more."""


def describe_ids(ids: Any, vocab_size: int) -> str | None:
    """Why `ids` is not a list of token ids of a vocabulary of this size; None if it is."""
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of several lengths
        return "a prompt must be a list of token ids, not of lists"
    if array.ndim != 1 or array.size == 0:
        return f"a prompt must be a list of at least one token id, got shape {array.shape}"
    if array.dtype.kind not in "iu":
        return f"token ids must be integers, got {array.dtype}"
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        return f"token id {int(wrong[0])} lies outside the vocabulary; ids go from 0 to {vocab_size - 1}"
    return None
