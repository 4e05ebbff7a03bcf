"""A model whose arithmetic can be done by hand, run by the real engine: exact tokens in seconds.

The next token after t_0 ... t_p is (7 + sum of (i + 1) * t_i) mod vocab. The sum is taken over what stands in the
sequence's KV pages (K holds a token, V its place), so that a wrong page, a stale one or a wrong order shows at once.
"""

import functools
import itertools
import queue
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallasite.kernels.paged_attention import write_pages
from pallasite.models.layers import parameter
from pallasite.models.model import CacheSpec, Model, materialize
from pallasite.serve.config import EngineConfig
from pallasite.serve.engine import Engine
from pallasite.serve.types import GenerationConfig, Request, StepOutput
from pallasite.sharding.mesh import make_mesh

VOCAB = 64


def next_token(tokens: list[int], vocab: int = VOCAB) -> int:
    """By hand."""
    return (7 + sum((i + 1) * t for i, t in enumerate(tokens))) % vocab


def continuation(prompt: list[int], count: int, vocab: int = VOCAB) -> list[int]:
    """The greedy answer, by hand."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


class HandModel(nnx.Module):
    """Implements models.model.CallableModel. A `poison` token makes the logits NaN; where a `bomb` token is run, the
    step fails in execution."""

    def __init__(self, vocab: int, poison: int | None, bomb: int | None):
        self.seven = parameter((1,), jnp.dtype(jnp.float32), ("embed",))
        self.vocab, self.poison, self.bomb = vocab, poison, bomb

    def __call__(self, batch, caches):
        [(k_pages, v_pages)] = caches
        tokens = batch.tokens.astype(jnp.float32)[:, None, None]  # [T, 1, 1]
        places = (batch.positions + 1).astype(jnp.float32)[:, None, None]
        k_pages = write_pages(k_pages, tokens, batch.write_pages, batch.write_offsets)
        v_pages = write_pages(v_pages, places, batch.write_pages, batch.write_offsets)
        rows, queries = batch.lengths.shape[0], batch.tokens.shape[0] // batch.lengths.shape[0]
        k = k_pages[batch.page_tables][:, :, 0, :, 0].reshape(rows, -1)  # [R, max_pages * page_size]
        v = v_pages[batch.page_tables][:, :, 0, :, 0].reshape(rows, -1)
        keys = jnp.arange(k.shape[1])
        limits = jnp.minimum(batch.positions.reshape(rows, queries), batch.lengths[:, None] - 1)
        seen = keys <= limits[..., None]  # [R, Q, keys]
        total = jnp.where(seen, (k * v)[:, None], 0).sum(-1).reshape(-1)  # [T], exact below 2 ** 24
        following = jnp.mod(self.seven[...] + total, self.vocab)
        if self.poison is not None:
            following = jnp.where(batch.tokens == self.poison, jnp.nan, following)
        if self.bomb is not None:
            following += jax.pure_callback(
                functools.partial(_explode, self.bomb), jax.ShapeDtypeStruct((), jnp.float32), batch.tokens
            )
        return following[:, None], [(k_pages, v_pages)]

    def logits(self, x: jax.Array) -> jax.Array:
        ids = jnp.arange(128, dtype=jnp.float32)
        # The right token has 0, the one after it -1, and so on around.
        scores = -jnp.mod(ids - x, self.vocab)
        return jnp.where(ids < self.vocab, scores, -jnp.inf)


def _explode(bomb: int, tokens) -> np.float32:
    if (np.asarray(tokens) == bomb).any():
        raise RuntimeError("boom")
    return np.float32(0)


def hand_model(
    vocab: int = VOCAB, max_session_len: int | None = 512, poison: int | None = None, bomb: int | None = None
) -> Model:
    """The model on one CPU device; vocab at most 128."""
    return materialize(
        lambda: HandModel(vocab, poison, bomb),
        make_mesh(1),
        lambda path, abstract: jnp.full(abstract.shape, 7, abstract.dtype),
        cache=CacheSpec(layers=1, kv_heads=1, head_dim=1, dtype=jnp.dtype(jnp.float32)),
        vocab_size=vocab,
        padded_vocab=128,
        max_session_len=max_session_len,
        default_session_len=max_session_len or 2048,
    )


def hand_engine(model: Model | None = None, **config) -> Engine:
    """An engine for it with small steps: pages of 16 tokens, chunks of 64, 4 slots."""
    defaults = {
        "session_len": 256,
        "max_batch_size": 4,
        "cache_block_seq_len": 16,
        "max_prefill_token_num": 64,
        "cache_max_entry_count": 129,
    }
    return Engine(model or hand_model(), EngineConfig(**(defaults | config)))


class Inbox:
    """Collects a request's outputs; result() waits for the last."""

    def __init__(self, request_id: str = "") -> None:
        self.request_id = request_id
        self.outputs: queue.Queue[StepOutput] = queue.Queue()
        self.seen: list[StepOutput] = []

    def next(self, timeout: float = 60) -> StepOutput:
        output = self.outputs.get(timeout=timeout)
        self.seen.append(output)
        return output

    def result(self, timeout: float = 60) -> StepOutput:
        """All outputs joined into one."""
        while not self.seen or self.seen[-1].finish_reason is None:
            self.next(timeout)
        last = self.seen[-1]
        return StepOutput(
            token_ids=tuple(t for o in self.seen for t in o.token_ids),
            text="".join(o.text for o in self.seen),
            logprobs=tuple(p for o in self.seen for p in o.logprobs),
            finish_reason=last.finish_reason,
            error=last.error,
            cached_tokens=last.cached_tokens,
            scores=last.scores,
        )


_numbers = itertools.count()


def ask(
    engine: Engine, prompt: list[int], stop_ids: tuple[int, ...] = (), score=None, seed: int = 0, **config
) -> Inbox:
    """Submit a request; config are fields of GenerationConfig."""
    inbox = Inbox(f"test-{next(_numbers)}")
    generation = GenerationConfig(**config)
    engine.submit(
        Request(inbox.request_id, prompt, generation, inbox.outputs.put, stop_ids=stop_ids, seed=seed, score=score)
    )
    return inbox


def settle(engine: Engine, timeout: float = 30) -> None:
    """Wait until nothing runs and nothing waits."""
    deadline = time.monotonic() + timeout
    while engine.stats().running or engine.stats().waiting:
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.005)
