"""From EngineConfig, the model and the device's free memory to the sizes that an engine is built for."""

import logging
import os

from jax.sharding import Mesh

from pallasite.models.model import Model
from pallasite.serve.config import BLOCK, EngineConfig
from pallasite.serve.programs import Sizes

log = logging.getLogger(__name__)

CPU_POOL_BYTES = 1 << 30
"""The default pool on CPU is at most this large."""
MAX_STEPS = 8
"""Most decode steps in a launch; how many are run is decided launch by launch."""


def free_bytes(mesh: Mesh) -> int:
    """Free memory of the device with the least, in bytes; on CPU the host's available memory, shared by its devices."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    stats = [device.memory_stats() for device in devices]
    return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats)


def check_session_len(config: EngineConfig, model_limit: int | None) -> None:
    """Raise ValueError where the session_len that was asked for can't be had from the model's positions, or from a pool
    whose pages are given as a number; both are known before any weight is read."""
    session, page = config.session_len, config.cache_block_seq_len
    if session is None:
        return
    if model_limit is not None and session > model_limit:
        raise ValueError(
            f"session_len is {session}; the model's positions end at {model_limit} "
            "(only dynamic rope scaling goes beyond)"
        )
    if isinstance(config.cache_max_entry_count, int):
        _check_pool(session, config.cache_max_entry_count, page)


def _check_pool(session: int, pages: int, page: int) -> None:
    # One page is scratch.
    if session > (pages - 1) * page:
        raise ValueError(
            f"session_len is {session}, but the KV pool holds {(pages - 1) * page} tokens "
            f"({pages} pages of {page}, one of them scratch); lower session_len or raise cache_max_entry_count"
        )


def resolve_sizes(model: Model, config: EngineConfig) -> Sizes:
    """Sizes of all buffers and programs. Raises ValueError where they can't be had, naming value and limit.

    A session_len that the pool can't hold is refused if it was asked for, and cut (with a warning) if it is the
    model's own: so a request that is admitted always fits when it is alone.
    """
    on_cpu = next(iter(model.mesh.devices.flat)).platform == "cpu"
    slots = config.max_batch_size or (16 if on_cpu else 128)
    page = config.cache_block_seq_len
    check_session_len(config, model.max_session_len)
    session = config.session_len or model.default_session_len
    if isinstance(config.cache_max_entry_count, int):
        pages = config.cache_max_entry_count
    else:
        budget = config.cache_max_entry_count * free_bytes(model.mesh) * model.mesh.devices.size
        if on_cpu:
            budget = min(budget, CPU_POOL_BYTES)
        pages = int(budget) // model.cache.page_bytes(page)
        if on_cpu:
            # Twice what a full batch can hold is room enough for prefixes; small models need not zero a whole GiB.
            pages = min(pages, 2 * slots * -(-session // page) + 1)
    longest = (pages - 1) * page
    if longest < page:
        raise ValueError(
            f"the KV pool has {pages} pages of {page} tokens; at least 2 are needed, one of them for scratch"
        )
    if config.session_len is not None:
        _check_pool(session, pages, page)
    elif session > longest:
        log.warning("session_len is cut from %d to the %d tokens that the KV pool holds", session, longest)
        session = longest
    chunk = config.max_prefill_token_num or (256 if on_cpu else 2048)
    chunk = min(chunk, max(2, -(-session // BLOCK)) * BLOCK * slots)
    return Sizes(slots, pages, page, session, chunk, min(MAX_STEPS, page))
