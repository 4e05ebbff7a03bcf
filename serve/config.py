"""EngineConfig: what an engine may use and how large its steps are."""

import dataclasses
import math
from typing import Literal

BLOCK = 32
"""Prefill works on blocks of this many tokens, each of one sequence; chunk sizes are multiples of it."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Names follow LMDeploy's TurbomindEngineConfig; every field is checked when the object is made.

    session_len: longest sequence, prompt and answer, in tokens (default: the model's own). max_batch_size: sequences
    decoded at once (default 128 on GPU, 16 on CPU). tp: devices that share the model. dtype: "auto", "float32",
    "bfloat16" (auto: bfloat16 on GPU, float32 on CPU). model_format: "auto", or the format that the source must have
    ("hf", "gguf", "pallasite"). cache_max_entry_count: a float in (0, 1) is the share of free device memory for the
    KV pool, an int a number of pages; on CPU a share is cut to 1 GiB. cache_block_seq_len: page size in tokens, a
    multiple of 16 in 16..128. enable_prefix_caching: reuse the pages of prompts that start alike.
    max_prefill_token_num: tokens of a prefill step; longer prompts are cut into chunks (default 2048 on GPU, 256 on
    CPU). quant_policy: 0, KV pages in the compute dtype. device: "auto", "cpu", "gpu". max_queue_size: requests that
    may wait for a place.
    """

    session_len: int | None = None
    max_batch_size: int | None = None
    tp: int = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    model_format: Literal["auto", "hf", "gguf", "pallasite"] = "auto"
    cache_max_entry_count: float | int = 0.8
    cache_block_seq_len: int = 64
    enable_prefix_caching: bool = True
    max_prefill_token_num: int | None = None
    quant_policy: int = 0
    device: Literal["auto", "cpu", "gpu"] = "auto"
    max_queue_size: int = 4096

    def __post_init__(self) -> None:
        self._integer("session_len", 2, 2**24, optional=True)
        self._integer("max_batch_size", 1, 1024, optional=True)
        self._integer("tp", 1, 1024)
        # Two blocks at least, so that the oldest prompt and a newcomer both get on with every step.
        self._integer("max_prefill_token_num", 2 * BLOCK, 2**20, optional=True)
        self._integer("cache_block_seq_len", 16, 128)
        self._integer("max_queue_size", 1, 2**20)
        for name, allowed in (
            ("dtype", ("auto", "float32", "bfloat16")),
            ("model_format", ("auto", "hf", "gguf", "pallasite")),
            ("device", ("auto", "cpu", "gpu")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if self.cache_block_seq_len % 16:
            raise ValueError(
                f"cache_block_seq_len is {self.cache_block_seq_len}; it must be a multiple of 16 in 16..128"
            )
        if self.max_prefill_token_num is not None and self.max_prefill_token_num % BLOCK:
            raise ValueError(f"max_prefill_token_num is {self.max_prefill_token_num}; it must be a multiple of {BLOCK}")
        if self.quant_policy != 0 or isinstance(self.quant_policy, bool):
            raise ValueError(
                f"quant_policy is {self.quant_policy!r}; only 0 (KV pages in the compute dtype) is supported"
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching is {self.enable_prefix_caching!r}; it must be True or False")
        share = self.cache_max_entry_count
        if isinstance(share, bool) or not isinstance(share, int | float) or not math.isfinite(share):
            raise ValueError(f"cache_max_entry_count is {share!r}; it must be a share in (0, 1) or a number of pages")
        if isinstance(share, float) and not 0 < share < 1:
            raise ValueError(f"cache_max_entry_count is {share}; as a float it is a share of free memory in (0, 1)")
        if isinstance(share, int) and share < 2:
            raise ValueError(f"cache_max_entry_count is {share}; as an int it is a number of pages, at least 2")

    def _integer(self, name: str, low: int, high: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}; it must be an integer in {low}..{high}")
