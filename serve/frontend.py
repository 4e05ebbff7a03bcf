"""The caller's side of the queue: from a prompt in any form to checked requests for the engine.

The notebook pipeline and the gRPC service both prepare their requests here, so that they give the same answers.
"""

import hashlib
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pallasite.serve.detokenizer import AnswerText, Detokenizer, StopWords
from pallasite.serve.engine import Engine
from pallasite.serve.slots import MAX_EOS_IDS
from pallasite.serve.tokenizer import Tokenizer
from pallasite.serve.types import MAX_BAD_IDS, MAX_STOP_IDS, GenerationConfig, Request, StepOutput, describe_ids

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray
"""A text, a conversation in OpenAI's form, or token ids."""


class Frontend:
    """An engine with what its callers need around it: tokenizer (None: token ids only), name, end-of-sequence ids."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, name: str, architecture: str, eos_ids: Sequence[int]
    ):
        self.engine, self.tokenizer, self.name, self.architecture = engine, tokenizer, name, architecture
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        if len(self.eos_ids) > MAX_EOS_IDS:
            raise ValueError(
                f"the model names {len(self.eos_ids)} end-of-sequence ids; at most {MAX_EOS_IDS} are supported"
            )

    @property
    def session_len(self) -> int:
        """Longest sequence, prompt and answer, in tokens."""
        return self.engine.sizes.session_len

    def token_ids(self, prompt: Prompt, *, do_preprocess: bool = True) -> list[int]:
        """Token ids of a prompt. A text is one user message for the chat template, unless do_preprocess is False or the
        checkpoint has no template. Raises ValueError saying what is wrong with it."""
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty")
            tokenizer = self._need_tokenizer("a text prompt")
            if do_preprocess and tokenizer.has_chat_template:
                return tokenizer.encode_chat([{"role": "user", "content": prompt}])
            ids = tokenizer.encode(prompt)
        elif isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            return self._need_tokenizer("a conversation").encode_chat(prompt)  # type: ignore[arg-type]
        elif isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
            problem = describe_ids(prompt, self.engine.model.vocab_size)
            if problem:
                raise ValueError(problem)
            return [int(i) for i in prompt]  # type: ignore[arg-type]
        else:
            raise ValueError(
                f"a prompt is a text, a list of messages or a list of token ids, not {type(prompt).__name__}"
            )
        if not ids:
            raise ValueError("the prompt has no tokens")
        return ids

    def requests(
        self,
        prompt: Prompt,
        config: GenerationConfig,
        emit: Callable[[int, StepOutput], None],
        *,
        do_preprocess: bool = True,
        request_id: str | None = None,
        score: Literal["logits", "nll"] | None = None,
    ) -> list[Request]:
        """config.n requests for one prompt, ready for Engine.submit; emit gets (choice, output) on the engine's thread.
        score: see Request.score.

        Raises ValueError, naming value and limit, for a prompt or a config that can't be served.
        """
        ids = self.token_ids(prompt, do_preprocess=do_preprocess)
        bad_ids = self._bad_ids(config)
        stop_ids = tuple(dict.fromkeys(config.stop_token_ids if config.stop_token_ids is not None else ()))
        if not config.ignore_eos:
            stop_ids = tuple(dict.fromkeys((*stop_ids, *self.eos_ids)))
        assert len(stop_ids) <= MAX_STOP_IDS + MAX_EOS_IDS
        if config.stop_words:
            self._need_tokenizer("stop_words")
        base = request_id or uuid.uuid4().hex
        seed = secrets.randbits(64) if config.random_seed is None else int(config.random_seed)
        requests = []
        for choice in range(config.n):
            request = Request(
                id=base if config.n == 1 else f"{base}-{choice}",
                prompt=ids,
                config=config,
                emit=lambda output, choice=choice: emit(choice, output),  # type: ignore[misc]
                stop_ids=stop_ids,
                bad_ids=bad_ids,
                seed=_fold(seed, choice),
                text=None if score else self._text_stream(ids, config),
                score=score,
            )
            self.engine.check(request)
            requests.append(request)
        return requests

    def close(self) -> None:
        """Close the engine and free its device memory."""
        self.engine.close()

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and the checkpoint has none; send token ids")
        return self.tokenizer

    def _text_stream(self, ids: Sequence[int], config: GenerationConfig) -> AnswerText | None:
        if self.tokenizer is None:
            return None
        return AnswerText(
            Detokenizer(self.tokenizer, ids, config.skip_special_tokens),
            StopWords(config.stop_words or (), config.include_stop_str_in_output),
        )

    def _bad_ids(self, config: GenerationConfig) -> tuple[int, ...]:
        """Token ids of bad_words: each word as one token, alone or after a space."""
        found: dict[int, None] = {}
        for word in config.bad_words or ():
            spellings = self._need_tokenizer("bad_words").encode_words(word)
            single = [ids[0] for ids in spellings if len(ids) == 1]
            if not single:
                raise ValueError(
                    f"bad_words holds {word!r}, which is {len(spellings[0])} tokens; only single tokens can be banned"
                )
            found |= dict.fromkeys(single)
        if len(found) > MAX_BAD_IDS:
            raise ValueError(f"bad_words stand for {len(found)} tokens; at most {MAX_BAD_IDS} are supported")
        return tuple(found)


def _fold(seed: int, choice: int) -> int:
    """32 bits of (seed, choice)."""
    message = seed.to_bytes(8, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=4).digest(), "little")
