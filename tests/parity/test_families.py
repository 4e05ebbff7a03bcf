"""The families' hard ways at once, against the originals: converted, on two devices, in chunks, preempted, and with
prefixes in the cache that were written under other rotary bases."""

import json
from pathlib import Path

import numpy as np
import pytest
from support import float64_decoder

from pallasite import EngineConfig, GenerationConfig, pipeline
from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
PAGE = 16
STEPS = GenerationConfig(max_new_tokens=24, ignore_eos=True)
FAMILIES = ["internlm2-tiny", "qwen1-tiny", "qwen2-tiny", "qwen3-tiny", "mistral-swa-tiny"]


class Case:
    """A golden case's prompts, by length, and their greedy continuations with a cache; all margins are clear."""

    def __init__(self, name: str):
        expected = np.load(GOLDEN / name / "expected.npz")
        greedy = "greedy_cached" if "greedy_cached_0" in expected else "greedy"
        count = sum(key.startswith("prompt_") for key in expected)
        order = sorted(range(count), key=lambda k: len(expected[f"prompt_{k}"]))
        self.prompts = [expected[f"prompt_{k}"].tolist() for k in order]
        self.answers = [expected[f"{greedy}_{k}"].tolist() for k in order]
        assert min(expected[f"{greedy}_margin_{k}"].min() for k in order) > 1e-3


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A case, and a pipeline of its conversion on two devices: chunks of 64 tokens, two slots, and a pool with one
    page more than the two longest prompts take."""
    case = Case(request.param)
    path = tmp_path_factory.mktemp(request.param) / "model"
    convert(GOLDEN / request.param, path, progress=False)
    taken = sum(-(-len(prompt) // PAGE) for prompt in case.prompts[-2:])
    config = EngineConfig(
        tp=2,
        max_batch_size=2,
        session_len=len(case.prompts[-1]) + 24,
        max_prefill_token_num=64,
        cache_block_seq_len=PAGE,
        cache_max_entry_count=taken + 2,  # and the scratch page
    )
    with pipeline(path, config, progress=False) as pipe:
        yield request.param, case, pipe


def test_a18_in_one_batch_in_chunks_and_preempted(family, monkeypatch):
    """The longest come first and run out of pages; the shorter ones follow. Nobody's base moves anybody else's, and who
    is preempted is recomputed whole, its own tokens under the bases that they had."""
    _, case, pipe = family
    monkeypatch.setattr(pipe.frontend.engine.scheduler, "prefix_caching", False)
    got = pipe.generate(case.prompts[::-1], STEPS)
    assert [r.token_ids for r in got] == case.answers[::-1]
    assert pipe.frontend.engine.stats().preemptions > 0
    assert pipe.frontend.engine.stats().compilations == 0


@pytest.mark.parametrize("family", ["internlm2-tiny", "qwen1-tiny"], indirect=True)
def test_a18_prefixes_written_under_another_base_are_not_taken(family):
    """The same tokens first under other bases, then as the golden prompt; and the golden prompt again, from the cache.

    InternLM2's base follows the prompt's length past 64 tokens, Qwen 1's is that of 32, 64, 128, ... tokens.
    """
    name, case, pipe = family
    pipe.frontend.engine.scheduler.pool.forget_all()
    prompt, answer = next((p, a) for p, a in zip(case.prompts, case.answers, strict=True) if len(p) == 70)

    def cached(tokens: list[int], reused: int) -> list[int]:
        response = pipe.generate(tokens, GenerationConfig(max_new_tokens=24, ignore_eos=True))
        assert response.cached_tokens == reused, len(tokens)
        return response.token_ids

    bases = {
        "internlm2-tiny": [(40, 0), (64, 32), (65, 0), (69, 0)],
        "qwen1-tiny": [(20, 0), (33, 0), (64, 32), (32, 16)],
    }
    for length, reused in bases[name]:
        cached(prompt[:length], reused)
    assert cached(prompt, 0) == answer
    assert cached(prompt, 64) == answer
    # A conversation goes on: the answer's tokens were written under their own lengths, and now are part of a prompt.
    longer = cached([*prompt, *answer, 5, 6, 7], {"internlm2-tiny": 0, "qwen1-tiny": 80}[name])
    pipe.frontend.engine.scheduler.pool.forget_all()
    assert cached([*prompt, *answer, 5, 6, 7], 0) == longer


def test_windows_in_some_layers(tmp_path):
    """Qwen 3's norms and Qwen 2's rule for windows, where no original has made numbers: against a decoder in float64,
    which gives the originals' logits where they have."""
    for name in ("qwen3-tiny", "mistral-swa-tiny", "qwen1-tiny", "internlm2-tiny"):
        expected = np.load(GOLDEN / name / "expected.npz")
        k = max(int(key.removeprefix("prompt_")) for key in expected if key.startswith("prompt_"))
        source = open_source(GOLDEN / name)
        own = float64_decoder.logits(source, expected[f"prompt_{k}"].tolist())
        np.testing.assert_allclose(own, expected[f"logits_{k}"], atol=2e-5)

    config = json.loads((GOLDEN / "qwen3-tiny" / "config.v4.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(GOLDEN / "qwen3-tiny" / "model.safetensors")
    assert open_source(tmp_path).info.config.windows == (None, 5)
    tokens = np.load(GOLDEN / "qwen3-tiny" / "expected.npz")["prompt_2"].tolist()
    right = float64_decoder.logits(open_source(tmp_path), tokens)
    small = EngineConfig(max_batch_size=1, max_prefill_token_num=64, cache_block_seq_len=PAGE, cache_max_entry_count=17)
    with pipeline(tmp_path, small, progress=False) as pipe:
        assert np.abs(pipe.get_logits(tokens) - right).max() <= 1e-4 * max(1.0, right.std())
        answer = pipe.generate(tokens[:40], GenerationConfig(max_new_tokens=12, ignore_eos=True)).token_ids
    following = float64_decoder.logits(open_source(tmp_path), tokens[:40] + answer)[39:-1]
    assert (following.max(-1) - following[np.arange(12), answer]).max() < 1e-4
