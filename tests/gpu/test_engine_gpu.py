"""The whole engine on a real GPU, against the same golden numbers as on CPU. Run with `make gpu-test`."""

from pathlib import Path

import jax
import numpy as np
import pytest
from support.parity import check_greedy

from pallasite import EngineConfig, GenerationConfig, pipeline

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
SMALL = {"max_batch_size": 4, "max_prefill_token_num": 64, "cache_max_entry_count": 65, "device": "gpu"}


def test_a_gpu_is_there():
    assert jax.devices("gpu")[0].platform == "gpu"


CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "model.safetensors").exists())


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_the_reference(name):
    """Every family and quantized format. Full float32, not tf32: the same bound as on CPU."""
    expected = np.load(GOLDEN / name / "expected.npz")
    greedy = "greedy_cached" if "greedy_cached_0" in expected else "greedy"
    count = sum(key.startswith("prompt_") for key in expected)
    with pipeline(GOLDEN / name, EngineConfig(dtype="float32", **SMALL), progress=False) as pipe:
        for k in range(count):
            prompt, reference = expected[f"prompt_{k}"].tolist(), expected[f"logits_{k}"]
            assert np.abs(pipe.get_logits(prompt) - reference).max() <= 1e-4 * max(1.0, reference.std())
            if f"{greedy}_{k}" in expected:
                tokens, margins = expected[f"{greedy}_{k}"].tolist(), expected[f"{greedy}_margin_{k}"].tolist()
                assert check_greedy(pipe, prompt, tokens, margins) >= len(tokens) // 2
        assert pipe.frontend.engine.stats().compilations == 0


def test_bfloat16_is_near_the_reference():
    """The default on GPU. 8 bits of mantissa through two layers: a few hundredths of the logits' spread."""
    expected = np.load(GOLDEN / "llama-tied-tiny" / "expected.npz")
    with pipeline(GOLDEN / "llama-tied-tiny", EngineConfig(**SMALL), progress=False) as pipe:
        logits, reference = pipe.get_logits(expected["prompt_2"].tolist()), expected["logits_2"]
        assert np.linalg.norm(logits - reference) / np.linalg.norm(reference) < 0.03


def test_a_batch_equals_each_alone():
    """Sampled with seeds, in float32."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, int(rng.integers(1, 90))).tolist() for _ in range(8)]
    configs = [
        GenerationConfig(max_new_tokens=20, ignore_eos=True, do_sample=i % 2 == 1, random_seed=i, top_p=0.9)
        for i in range(8)
    ]
    with pipeline(GOLDEN / "llama-tied-tiny", EngineConfig(dtype="float32", **SMALL), progress=False) as pipe:
        alone = [pipe.generate(p, c).token_ids for p, c in zip(prompts, configs, strict=True)]
        assert [r.token_ids for r in pipe.generate(prompts, configs)] == alone
