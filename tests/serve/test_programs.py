"""The compiled step programs: what they must not contain, and the sizes that they are built for."""

import logging
import re
from pathlib import Path

import pytest
from support.compiling import optimized
from support.hand_model import ask, continuation, hand_engine, hand_model

from pallasite.convert.formats import open_source
from pallasite.convert.load import load_model
from pallasite.serve.config import EngineConfig
from pallasite.serve.memory import resolve_sizes
from pallasite.serve.programs import Programs, Sizes, buckets
from pallasite.sharding.mesh import make_mesh

MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-tied-tiny"


def test_no_step_copies_the_pool():
    """The pool is donated and updated in place: nothing in the optimized programs copies an array of its shape."""
    model = load_model(open_source(MODEL), make_mesh(1), "float32", keep_int4=False)
    sizes = Sizes(slots=2, pages=37, page_size=16, session_len=128, prefill_tokens=64, max_steps=8)
    with optimized():
        programs = Programs(model, sizes)
    shape = r"f32\[37,2,16,16\]"
    for name in ("decode-1", "decode-2", "prefill-64", "score"):
        text = programs._programs[name].as_text()
        assert re.search(shape, text), "the pool's shape is not what this test looks for"
        assert not re.findall(rf"= {shape}\S* copy\(", text)
        # Every page array of both layers is an alias of its input.
        assert text.count("may-alias") + text.count("must-alias") >= 4
    programs.close()


def test_every_donated_buffer_is_consumed(recwarn):
    """JAX warns where a donated buffer could not be used; there is no such warning (all warnings are errors here)."""
    engine = hand_engine(max_batch_size=1)
    caches = engine.programs.caches
    ask(engine, [1, 2, 3], max_new_tokens=4).result()
    assert all(page.is_deleted() for pages in caches for page in pages)
    engine.close()


def test_buckets():
    assert buckets(1, 1) == [1]
    assert buckets(1, 5) == [1, 2, 4, 5]
    assert buckets(32, 256) == [32, 64, 128, 256]


def test_odd_sizes_compile_nothing_later():
    """Lengths 1 to 60 and batches of all sizes, with odd limits: every shape was compiled at the start."""
    engine = hand_engine(max_batch_size=3, max_prefill_token_num=96, session_len=77)
    for length in range(1, 60, 7):
        prompts = [[(length + i) % 64] * length for i in range(length % 5 + 1)]
        inboxes = [
            ask(
                engine,
                p,
                max_new_tokens=5,
                do_sample=i % 2 == 1,
                logprobs=i or None,
                top_p=0.9,
                repetition_penalty=1.0 + i / 9,
            )
            for i, p in enumerate(prompts)
        ]
        for inbox in inboxes:
            assert inbox.result().finish_reason == "length"
    assert engine.stats().compilations == 0
    engine.close()


class TestSizes:
    """How EngineConfig becomes sizes, and what is refused."""

    def test_defaults_on_cpu(self):
        sizes = resolve_sizes(hand_model(), EngineConfig())
        assert (sizes.slots, sizes.page_size, sizes.session_len, sizes.prefill_tokens) == (16, 64, 512, 256)
        assert sizes.pages == 2 * 16 * 8 + 1

    def test_a_share_is_at_most_a_gibibyte(self):
        model = hand_model(max_session_len=2**20)
        sizes = resolve_sizes(model, EngineConfig(cache_max_entry_count=0.9, max_batch_size=1024))
        assert sizes.pages * model.cache.page_bytes(64) <= 1 << 30

    def test_session_beyond_the_model(self):
        with pytest.raises(ValueError, match=r"session_len is 513; the model's positions end at 512"):
            resolve_sizes(hand_model(), EngineConfig(session_len=513))

    def test_session_beyond_the_pool(self):
        config = EngineConfig(session_len=257, cache_max_entry_count=5)
        with pytest.raises(ValueError, match="session_len is 257, but the KV pool holds 256 tokens"):
            resolve_sizes(hand_model(), config)

    def test_the_models_session_is_cut_to_the_pool(self, caplog):
        with caplog.at_level(logging.WARNING):
            sizes = resolve_sizes(hand_model(), EngineConfig(cache_max_entry_count=5))
        assert sizes.session_len == 256
        assert "cut from 512 to the 256 tokens" in caplog.text


@pytest.mark.parametrize("length", [47, 48, 49, 63])
def test_a_pool_of_one_session_serves_it_to_the_last_token(length):
    """Pages for exactly session_len tokens: a prompt at every border finishes, and so do three short ones behind it."""
    engine = hand_engine(session_len=64, cache_max_entry_count=5, max_batch_size=2)
    prompt = [(i * 3) % 64 for i in range(length)]
    first = ask(engine, prompt, max_new_tokens=100)
    behind = [ask(engine, [i], max_new_tokens=40) for i in range(3)]
    assert list(first.result().token_ids) == continuation(prompt, 64 - length)
    for i, inbox in enumerate(behind):
        assert list(inbox.result().token_ids) == continuation([i], 40)
    engine.close()
