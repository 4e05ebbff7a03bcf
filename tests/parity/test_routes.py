"""The same tokens whatever the route, on a real (small) Llama in float32, greedy and sampled."""

import concurrent.futures
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from support.live_server import LiveServer, collect, ids_request

from pallasite import EngineConfig, GenerationConfig, pipeline

MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-rope3-tiny"
BASE = {"max_batch_size": 16, "max_prefill_token_num": 64, "cache_block_seq_len": 16, "cache_max_entry_count": 257}


def mixed_requests() -> tuple[list[list[int]], list[GenerationConfig]]:
    """16 prompts that partly start alike, with settings of their own."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 320, 50).tolist()
    prompts, configs = [], []
    for i in range(16):
        own = rng.integers(0, 320, int(rng.integers(1, 100))).tolist()
        prompts.append(shared + own if i % 3 == 0 else own)
        configs.append(
            GenerationConfig(
                max_new_tokens=int(rng.integers(10, 40)),
                ignore_eos=True,
                do_sample=i % 2 == 1,
                temperature=0.7 + 0.1 * (i % 4),
                top_k=(0, 5, 50)[i % 3],
                top_p=(1.0, 0.8)[i % 2],
                repetition_penalty=(1.0, 1.2)[i % 4 == 1],
                random_seed=i,
            )
        )
    return prompts, configs


PROMPTS, CONFIGS = mixed_requests()


@pytest.fixture(scope="module")
def pipe():
    with pipeline(MODEL, EngineConfig(**BASE), progress=False) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def tokens(pipe) -> list[list[int]]:
    """Each request alone: what every route must give."""
    return [pipe.generate(p, c).token_ids for p, c in zip(PROMPTS, CONFIGS, strict=True)]


def test_batch_of_sixteen(pipe, tokens):
    assert [r.token_ids for r in pipe.generate(PROMPTS, CONFIGS)] == tokens
    assert pipe.frontend.engine.stats().compilations == 0


def test_stream(pipe, tokens):
    streamed: dict[int, list[int]] = {i: [] for i in range(16)}
    reasons = []
    for piece in pipe.stream_infer(PROMPTS, CONFIGS):
        streamed[piece.index] += piece.token_ids
        reasons.append(piece.finish_reason)
    assert [streamed[i] for i in range(16)] == tokens
    assert sum(r is not None for r in reasons) == 16


def test_grpc(pipe, tokens):
    """All 16 at once through a server on a real port, over the same engine as the pipeline's."""
    server = LiveServer(pipe.frontend)

    def ask(prompt: list[int], config: GenerationConfig) -> list[int]:
        default = GenerationConfig()
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        changed = {k: v for k, v in fields.items() if v != getattr(default, k)}
        _, ids, _ = collect(server.stub.Generate(ids_request(prompt, **changed), timeout=120))
        return ids

    with concurrent.futures.ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(ask, PROMPTS, CONFIGS))
    server.close()
    assert answers == tokens


@pytest.mark.parametrize(
    "change",
    [
        {"enable_prefix_caching": False, "max_prefill_token_num": 256},
        {"cache_max_entry_count": 20},  # 19 pages of 16 tokens for 16 requests of up to 190
        {"tp": 2},
    ],
    ids=["no prefix cache, whole prefill", "preemption", "tp=2"],
)
def test_other_engines(change, tokens):
    with pipeline(MODEL, EngineConfig(**(BASE | {"max_batch_size": 8} | change)), progress=False) as other:
        assert [r.token_ids for r in other.generate(PROMPTS, CONFIGS)] == tokens
        stats = other.frontend.engine.stats()
        assert (stats.preemptions > 0) == ("cache_max_entry_count" in change)
        assert stats.compilations == 0
        if "tp" in change:
            expected = np.load(MODEL / "expected.npz")
            logits = other.get_logits(expected["prompt_2"].tolist())
            assert np.abs(logits - expected["logits_2"]).max() <= 1e-4 * max(1.0, expected["logits_2"].std())


def test_dynamic_rope_keeps_each_token_under_its_own_base(tmp_path):
    """Past the trained length a token's base follows from the prompt's length and its place; chunks, the prefix cache,
    preemption and neighbours must not change it."""
    raw = json.loads((MODEL / "config.json").read_text())
    raw["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    raw["max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    answers = []
    for change in (
        {"enable_prefix_caching": False, "max_prefill_token_num": 256},
        {},
        {"cache_max_entry_count": 20},
    ):
        config = EngineConfig(**(BASE | {"max_batch_size": 4, "session_len": 192} | change))
        with pipeline(tmp_path, config, progress=False) as other:
            twice = other.generate(PROMPTS * 2, CONFIGS * 2)
            answers += [[r.token_ids for r in twice[:16]], [r.token_ids for r in twice[16:]]]
            assert not any(r.error for r in twice)
    assert all(answer == answers[0] for answer in answers)


def test_many_answers_to_one_prompt(pipe):
    """n answers have their own noise, which follows from the seed."""
    config = GenerationConfig(max_new_tokens=10, do_sample=True, temperature=2.0, random_seed=3, n=4, ignore_eos=True)
    first, again = pipe.generate(PROMPTS[0], config), pipe.generate(PROMPTS[0], config)
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert len({tuple(r.token_ids) for r in first}) == 4
    assert [(r.index, r.choice) for r in first] == [(0, i) for i in range(4)]


def test_without_a_seed_answers_differ(pipe):
    config = GenerationConfig(max_new_tokens=10, do_sample=True, temperature=1.0, ignore_eos=True)
    together = [tuple(r.token_ids) for r in pipe.generate([PROMPTS[0]] * 10, config)]
    one_by_one = [tuple(pipe.generate(PROMPTS[0], config).token_ids) for _ in range(10)]
    assert len(set(together + one_by_one)) == 20
