"""Quantized checkpoints of other people's packers: integers, weights and logits (tests/data/golden/*/README.md)."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import unpack
from support.parity import check_greedy

from pallasite import EngineConfig, pipeline
from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.int4 import Int4Tensor, unpack_rows

CASES = (
    "awq-llama",
    "awq-qwen2",
    "ct-int4-g128-asym",
    "ct-int4-g128-sym",
    "gptq-asym-descact",
    "gptq-asym-v1zeros",
    "gptq-sym",
)

HF_NAMES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def linears(info):
    """(our name, Hugging Face's module) of every linear."""
    for i, (ours, theirs) in itertools.product(range(info.config.num_layers), HF_NAMES.items()):
        yield f"layers.{i}.{ours}.weight", f"model.layers.{i}.{theirs}"


@pytest.mark.parametrize("case", CASES)
def test_integers_and_weights_are_exact(case, golden, tmp_path):
    """Of every linear: the integers, zeros and scales that the file holds, by an unpacker of the tests' own, and the
    weights that the packing library gives, bit for bit; from the source, and from a conversion of it."""
    folder = golden / case
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored, right = load_file(folder / "model.safetensors"), np.load(folder / "dequant.npz")
    convert(folder, tmp_path / "converted", progress=False)
    source, converted = open_source(folder), open_source(tmp_path / "converted")
    for name, module in linears(source.info):
        q, zeros, scales, group = unpack.linear(stored, module, config)  # [K, N], [G, N], [G, N], [K]
        first, second = source.read(name), converted.read(name)
        for tensor in (first, second):
            assert isinstance(tensor, Int4Tensor)
            k, _ = tensor.shape
            order = np.arange(k) if tensor.permutation is None else tensor.permutation
            np.testing.assert_array_equal(unpack_rows(tensor.packed, k), q[order], err_msg=name)
            np.testing.assert_array_equal(tensor.zeros, zeros, err_msg=name)
            np.testing.assert_array_equal(tensor.scales, scales, err_msg=name)
            np.testing.assert_array_equal(group[order], np.arange(k) // tensor.group_size)
            assert tensor.scales.dtype == scales.dtype
            np.testing.assert_array_equal(tensor.dequantize().T, right[f"{module}.weight"], err_msg=name)


@pytest.mark.parametrize("variant", ["source", "converted, expanded", "converted, tp=2"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy(case, variant, golden, tmp_path, monkeypatch):
    """INT4 in memory from the source, and from a conversion on two devices; a conversion expanded while it loads."""
    folder, expected = golden / case, np.load(golden / case / "expected.npz")
    if variant != "source":
        folder = tmp_path / "converted"
        convert(golden / case, folder, progress=False)
    expanded = variant == "converted, expanded"
    if not expanded:
        monkeypatch.setattr("pallasite.serve.open.free_bytes", lambda mesh: 0)
    tp = 2 if variant == "converted, tp=2" else 1
    config = EngineConfig(tp=tp, max_batch_size=1, max_prefill_token_num=64, cache_max_entry_count=17)
    with pipeline(folder, config, progress=False) as pipe:
        packed = sum(leaf.dtype == np.int32 for leaf in pipe.frontend.engine.model.leaves)
        assert (packed == 0) == expanded
        for k in range(3):
            prompt, reference = expected[f"prompt_{k}"].tolist(), expected[f"logits_{k}"]
            error = np.abs(pipe.get_logits(prompt) - reference).max()
            assert error <= 1e-4 * max(1.0, reference.std()), (k, error)
        greedy, margins = expected["greedy_2"].tolist(), expected["greedy_margin_2"].tolist()
        assert check_greedy(pipe, expected["prompt_2"].tolist(), greedy, margins) >= 20
