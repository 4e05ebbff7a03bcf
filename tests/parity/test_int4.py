"""INT4 in memory gives what its dequantized weights give: fused, with ragged groups or permuted rows, and cut over two
devices."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.hand_model import Inbox
from support.quantized import FIELDS, quantize_linears, random_order

from pallasite import EngineConfig, GenerationConfig
from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.load import load_model
from pallasite.serve.engine import Engine
from pallasite.serve.types import Request
from pallasite.sharding.mesh import make_mesh

MODEL = "llama-rope3-tiny"
"""Hidden size 64 and MLP width 160: groups of 128 end ragged everywhere, and no half of 160 is whole groups."""


@pytest.fixture
def logits(golden):
    """logits(checkpoint, tp, keep_int4): the golden prompt's logits, and how many matrices are packed in memory."""
    prompt = np.load(golden / MODEL / "expected.npz")["prompt_2"].tolist()

    def score(checkpoint, tp, keep_int4):
        model = load_model(open_source(checkpoint), make_mesh(tp), "float32", keep_int4=keep_int4)
        packed = sum(leaf.dtype == np.int32 and leaf.ndim == 2 for leaf in model.leaves)
        config = EngineConfig(tp=tp, max_batch_size=1, max_prefill_token_num=128, cache_max_entry_count=9)
        engine = Engine(model, config)
        inbox = Inbox()
        engine.submit(Request("int4", prompt, GenerationConfig(), inbox.outputs.put, score="logits"))
        scores = inbox.result().scores
        engine.close()
        return scores, packed

    return score


def write_folders(model: Path, folder: Path, group: int, orders: dict[str, np.ndarray]) -> None:
    """`model` with random GPTQ linears in folder/gptq, and with their float32 weights in folder/float."""
    stored, floating = quantize_linears(load_file(model / "model.safetensors"), "gptq", group, orders)
    config = json.loads((model / "config.json").read_text())
    fields = {"quantization_config": FIELDS["gptq"] | {"group_size": group}}
    for name, tensors, more in (("gptq", stored, fields), ("float", floating, {})):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config | more))


@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_in_memory(group_size, tmp_path, golden, logits):
    path = tmp_path / "int4"
    convert(golden / MODEL, path, quantize="int4", group_size=group_size, progress=False)
    right, packed = logits(path, 1, keep_int4=False)
    assert packed == 0
    for tp in (1, 2):
        scores, packed = logits(path, tp, keep_int4=True)
        assert packed == 2 * 4  # two layers of four matrices
        assert np.abs(scores - right).max() < 2e-5


@pytest.mark.parametrize(
    ("case", "group", "packed"),
    [
        ("one group", -1, 8),
        ("order of inputs", 32, 8),
        ("order of inputs, ragged", 128, 8),
        ("order of parts", 32, 4),
    ],
)
def test_a04_a06_other_peoples_groups(case, group, packed, tmp_path, golden, logits):
    """Groups over the whole K, which two devices cut; and orders of rows (desc_act), one for all that take an input,
    as GPTQ makes them, or one for each part of a fused matrix, which is then expanded."""
    orders = {}
    if case != "one group":
        q, gate, o, down = (random_order(k, group, seed=i) for i, k in enumerate((64, 64, 64, 160)))
        orders = {"q_proj": q, "k_proj": q, "v_proj": q, "gate_proj": gate, "up_proj": gate}
        orders |= {"o_proj": o, "down_proj": down}
    if case == "order of parts":
        del orders["v_proj"]
        orders["up_proj"] = q
    write_folders(golden / MODEL, tmp_path, group, orders)
    right, _ = logits(tmp_path / "float", 1, keep_int4=False)
    for tp in (1, 2):
        scores, held = logits(tmp_path / "gptq", tp, keep_int4=True)
        assert held == packed
        assert np.abs(scores - right).max() <= 1e-4 * max(1, right.std())


def test_one_group_is_cut_and_not_padded_to_whole_ones(golden, tmp_path):
    """160 rows on two devices stand as 2 x 128, not 2 x 160."""
    write_folders(golden / MODEL, tmp_path, -1, {})
    model = load_model(open_source(tmp_path / "gptq"), make_mesh(2), "float32", keep_int4=True)
    assert max(leaf.shape[0] for leaf in model.leaves if leaf.dtype == np.int32) == 2 * 128 // 8
