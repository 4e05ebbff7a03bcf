"""One small pipeline for most of the tests of the public API."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.small_checkpoint import with_tokenizer

from pallasite import EngineConfig, Pipeline, pipeline

SMALL = {"max_batch_size": 4, "max_prefill_token_num": 64, "cache_max_entry_count": 65, "cache_block_seq_len": 16}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with weights, tokenizer and chat template."""
    return with_tokenizer(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture
def open_small(checkpoint: Path) -> Callable[..., Pipeline]:
    """Opens it anew, for tests that close it or that need another path or another config."""

    def make(path: Path | None = None, **config) -> Pipeline:
        return pipeline(path or checkpoint, EngineConfig(**(SMALL | config)), progress=False)

    return make


@pytest.fixture(scope="session")
def shared(checkpoint: Path) -> Iterator[Pipeline]:
    """The one pipeline; 64 pages of 16 tokens for 4 slots."""
    with pipeline(checkpoint, EngineConfig(**SMALL), progress=False) as pipe:
        yield pipe


@pytest.fixture
def pipe(shared: Pipeline) -> Iterator[Pipeline]:
    """The shared pipeline. Whatever a test did to it, in the end all pages are free and nothing was compiled."""
    yield shared
    engine = shared.frontend.engine
    deadline = time.monotonic() + 20
    while (stats := engine.stats()).running or stats.waiting or stats.pages_free < stats.pages_total:
        assert time.monotonic() < deadline, stats
        time.sleep(0.005)
    assert stats.compilations == 0
    assert stats.failed_steps == 0
