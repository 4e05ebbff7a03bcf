"""The step programs, compiled before serving, and the device buffers that they share: KV pool and slot state.

Every shape that serving can need is a bucket, compiled ahead of time; calling a program afterwards can't compile
anything. The pool and the state are donated from call to call and never copied.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallasite.models.model import Model
from pallasite.serve import steps
from pallasite.serve.config import BLOCK
from pallasite.serve.sampling import Sampled
from pallasite.serve.slots import SlotState
from pallasite.serve.steps import Chunk, PrefillLayout
from pallasite.serve.types import Sequence
from pallasite.sharding.mesh import replicated, sharding, spec

log = logging.getLogger(__name__)

CACHE_AXES = ("pages", "kv_heads", "page", "head_dim")
COMPILER_OPTIONS: dict[str, str | bool | int] = {}
"""XLA options for the step programs, beside XLA_FLAGS; the tests compile tiny models without optimization."""
MAX_PREFILL_ROWS = 16
"""Most sequences whose chunks one prefill call takes."""
SCORE_TOKENS = 256
"""Most tokens of a scoring step: its logits are whole, float32 [tokens, vocab]."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that all programs are compiled for; the engine derives them from EngineConfig and the model."""

    slots: int
    pages: int
    page_size: int
    session_len: int
    prefill_tokens: int
    max_steps: int

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.session_len // self.page_size)


def buckets(smallest: int, largest: int) -> list[int]:
    """Doubling sizes from `smallest`, and `largest` itself at the end."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


@dataclasses.dataclass
class Launch:
    """A step under way: its device results, and which sequence each row belongs to (the launch's own snapshot).

    chunks: of a prefill or a score. rows: of a decode, in bucket order, with the number of steps. host(): blocks until
    the step is done. started: time.monotonic() at dispatch.
    """

    kind: str
    result: Any
    chunks: Seq[Chunk] = ()
    rows: Seq[Sequence] = ()
    steps: int = 1
    started: float = 0.0


class Programs:
    """Compiled programs of a model for fixed sizes, with the pool and the slot state that they work on."""

    def __init__(self, model: Model, sizes: Sizes, progress: Callable[[int, int], None] = lambda done, total: None):
        self.model, self.sizes = model, sizes
        self.decode_buckets = buckets(1, sizes.slots)
        self.prefill_buckets = [
            PrefillLayout(t, min(t // BLOCK, MAX_PREFILL_ROWS, sizes.slots), sizes.max_pages, sizes.slots)
            for t in buckets(BLOCK, sizes.prefill_tokens)
        ]
        score_tokens = min(SCORE_TOKENS, sizes.prefill_tokens)
        self.score_layout = PrefillLayout(score_tokens, 1, sizes.max_pages, sizes.slots)
        self._leaf_specs = model.specs
        self._cache_spec = spec(CACHE_AXES)
        self._on_all = replicated(model.mesh)
        self._steady: tuple[tuple[int, ...], int, jax.Array] | None = None
        self._compile(progress)
        self.reset()

    def reset(self) -> None:
        """Fresh, empty pool and slot state (at start, and after a failed step lost the donated ones)."""
        self.caches = self.state = self._steady = None
        self.caches, self.state = self._programs["reset"]()

    def close(self) -> None:
        """Drop the device buffers, weights included, and the programs."""
        self.caches = self.state = self._steady = None
        self.model = dataclasses.replace(self.model, leaves=())
        self._programs.clear()

    # Compilation.

    def _compile(self, progress: Callable[[int, int], None]) -> None:
        self._programs: dict[str, Any] = {}
        jobs = self._jobs()
        workers = max(1, min(len(jobs), os.cpu_count() or 1))
        with concurrent.futures.ThreadPoolExecutor(workers, "compile") as pool:
            # Longest first, so that the threads end together.
            futures = {pool.submit(_compile, job): name for name, job in jobs.items()}
            progress(0, len(jobs))
            try:
                for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                    self._programs[futures[future]] = future.result()
                    progress(done, len(jobs))
            except BaseException:  # Ctrl-C, too, should not wait for what hasn't begun
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _jobs(self) -> dict[str, Callable[[], Any]]:
        """A lowering for each program, by name."""
        sizes, model = self.sizes, self.model
        cache_shape = (sizes.pages, model.cache.kv_heads, sizes.page_size, model.cache.head_dim)
        cache_sharding = sharding(model.mesh, CACHE_AXES)

        def fresh() -> tuple[list[Any], SlotState]:
            caches = [
                (jnp.zeros(cache_shape, model.cache.dtype), jnp.zeros(cache_shape, model.cache.dtype))
                for _ in range(model.cache.layers)
            ]
            return caches, SlotState.empty(sizes.slots, sizes.max_pages, model.padded_vocab)

        def with_sharding(x: Any, where: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        abstract_caches, abstract_state = jax.eval_shape(fresh)
        caches = jax.tree.map(lambda x: with_sharding(x, cache_sharding), abstract_caches)
        state = jax.tree.map(lambda x: with_sharding(x, self._on_all), abstract_state)
        leaves = tuple(with_sharding(leaf, leaf.sharding) for leaf in model.leaves)

        def packed(width: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((width,), jnp.int32, sharding=self._on_all)

        def lower_reset() -> Any:
            out = (jax.tree.map(lambda x: x.sharding, caches), jax.tree.map(lambda x: x.sharding, state))
            return jax.jit(fresh, out_shardings=out).lower()

        def lower_step(step: Callable[..., Any], width: int) -> Any:
            whole = PartitionSpec()
            mapped = jax.shard_map(
                self._bound(step),
                mesh=model.mesh,
                in_specs=(self._leaf_specs, self._cache_spec, whole, whole),
                out_specs=(self._cache_spec, whole, whole),
                check_vma=False,
            )
            return jax.jit(mapped, donate_argnums=(1, 2)).lower(leaves, caches, state, packed(width))

        jobs: dict[str, Callable[[], Any]] = {}
        for layout in reversed(self.prefill_buckets):
            step = functools.partial(steps.prefill, layout=layout, page_size=sizes.page_size)
            jobs[f"prefill-{layout.tokens}"] = functools.partial(lower_step, step, layout.width)
        for n in reversed(self.decode_buckets):
            step = functools.partial(steps.decode, slots=n, max_steps=sizes.max_steps, page_size=sizes.page_size)
            jobs[f"decode-{n}"] = functools.partial(lower_step, step, 3 * n + 1)

        def score(model: Any, caches: Any, state: SlotState, packed: jax.Array) -> Any:
            caches, logits, nll = steps.score(
                model, caches, packed, layout=self.score_layout, page_size=sizes.page_size
            )
            return caches, state, (logits, nll)

        jobs["score"] = functools.partial(lower_step, score, self.score_layout.width + self.score_layout.tokens)
        jobs["set_counts"] = lambda: jax.jit(steps.set_counts, donate_argnums=0).lower(
            state, packed(4 + steps.COUNT_TOKENS)
        )
        jobs["reset"] = lower_reset
        return jobs

    def _bound(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step` over flat leaves, in full float32 where the model computes in it (GPUs would use tf32)."""

        def run(leaves: tuple[jax.Array, ...], caches: Any, state: SlotState, packed: jax.Array) -> Any:
            precision = "highest" if self.model.cache.dtype == jnp.float32 else None
            with jax.default_matmul_precision(precision):
                return step(self.model.bind(leaves), caches, state, packed)

        return run

    # Launching. Each returns at once; the results are ready when the device gets there.

    def _run(self, name: str, packed: jax.Array) -> Any:
        self.caches, self.state, result = self._programs[name](self.model.leaves, self.caches, self.state, packed)
        return result

    def _put(self, packed: np.ndarray) -> jax.Array:
        return jax.device_put(packed, self._on_all)

    def prefill(self, chunks: Seq[Chunk]) -> Launch:
        """One prefill step over `chunks`, in the smallest bucket that holds them."""
        blocks = sum(chunk.blocks for chunk in chunks)
        layout = next(b for b in self.prefill_buckets if b.blocks >= blocks and b.rows >= len(chunks))
        result = self._run(f"prefill-{layout.tokens}", self._put(layout.pack(chunks)))
        return Launch("prefill", result, chunks=chunks, started=time.monotonic())

    def decode(self, rows: Seq[Sequence], new_pages: Seq[tuple[int, int]], count: int) -> Launch:
        """Up to `count` decode steps of `rows`. new_pages: for each row the page-table column and page id to set,
        (max_pages, 0) for none."""
        n = next(b for b in self.decode_buckets if b >= len(rows))
        slots = tuple(seq.slot for seq in rows)
        edited = any(column < self.sizes.max_pages for column, _ in new_pages)
        if not edited and self._steady is not None and self._steady[:2] == (slots, count):
            packed = self._steady[2]  # nothing to tell the device: the same array again
        else:
            words = np.empty(3 * n + 1, np.int32)
            words[:n] = self.sizes.slots
            words[n : 2 * n] = self.sizes.max_pages
            words[2 * n : 3 * n] = 0
            words[: len(rows)] = slots
            words[n : n + len(rows)] = [column for column, _ in new_pages]
            words[2 * n : 2 * n + len(rows)] = [page for _, page in new_pages]
            words[-1] = count
            packed = self._put(words)
            self._steady = None if edited else (slots, count, packed)
        return Launch("decode", self._run(f"decode-{n}", packed), rows=rows, steps=count, started=time.monotonic())

    def score(self, chunk: Chunk) -> Launch:
        """One scoring step."""
        tokens = chunk.seq.tokens
        following = np.full(self.score_layout.tokens, -1, np.int32)
        after = tokens[chunk.start + 1 : chunk.start + 1 + chunk.count]
        following[: len(after)] = after
        packed = np.concatenate([self.score_layout.pack([chunk]), following])
        return Launch("score", self._run("score", self._put(packed)), chunks=[chunk], started=time.monotonic())

    def set_counts(self, seq: Sequence) -> None:
        """Build the slot's penalty counts from the sequence's tokens."""
        width = steps.COUNT_TOKENS
        for at in range(0, len(seq.tokens), width):
            tokens = seq.tokens[at : at + width]
            packed = np.zeros(4 + width, np.int32)
            packed[:4] = seq.slot, at == 0, min(max(seq.prompt_len - at, 0), len(tokens)), len(tokens)
            packed[4 : 4 + len(tokens)] = tokens
            self.state = self._programs["set_counts"](self.state, self._put(packed))


def read(sampled: Sampled, logprobs: bool) -> Sampled:
    """The results on the host, waiting for them; log-probabilities only where they are wanted."""
    if logprobs:
        return jax.tree.map(np.asarray, sampled)
    tokens: Any = np.asarray(sampled.tokens)
    return dataclasses.replace(sampled, tokens=tokens)


def _compile(lower: Callable[[], Any]) -> Any:
    return lower().compile(compiler_options=COMPILER_OPTIONS)


class CompileCounter:
    """Counts compilations on one thread. The engine's thread must see none once it serves."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def watch_this_thread(self) -> None:
        """Count from now on, on the calling thread."""
        self._thread = threading.get_ident()

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.get_ident() == self._thread:
            self.count += 1
            log.warning("compilation while serving: %.2f s", duration_secs)

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)
