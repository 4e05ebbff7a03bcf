"""INT4 in memory gives what its dequantized weights give: fused, with ragged groups, and cut over two devices."""

from pathlib import Path

import numpy as np
import pytest
from support.hand_model import Inbox

from pallasite import EngineConfig, GenerationConfig
from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.load import load_model
from pallasite.serve.engine import Engine
from pallasite.serve.types import Request
from pallasite.sharding.mesh import make_mesh

MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-rope3-tiny"
PROMPT = np.load(MODEL / "expected.npz")["prompt_2"].tolist()


def logits(checkpoint: Path, tp: int, keep_int4: bool) -> tuple[np.ndarray, int]:
    """The prompt's logits, and how many parameters stand in memory as packed INT4."""
    model = load_model(open_source(checkpoint), make_mesh(tp), "float32", keep_int4=keep_int4)
    packed = sum(leaf.dtype == np.int32 for leaf in model.leaves)
    config = EngineConfig(tp=tp, max_batch_size=1, max_prefill_token_num=128, cache_max_entry_count=9)
    engine = Engine(model, config)
    inbox = Inbox()
    engine.submit(Request("int4", PROMPT, GenerationConfig(), inbox.outputs.put, score="logits"))
    scores = inbox.result().scores
    engine.close()
    return scores, packed


@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_in_memory(group_size, tmp_path):
    """Hidden size 64 and MLP width 160: groups of 128 end ragged everywhere, and no half of 160 is whole groups."""
    path = tmp_path / "int4"
    convert(MODEL, path, quantize="int4", group_size=group_size, progress=False)
    right, packed = logits(path, 1, keep_int4=False)
    assert packed == 0
    for tp in (1, 2):
        scores, packed = logits(path, tp, keep_int4=True)
        assert packed == 2 * 4  # two layers of four matrices
        assert np.abs(scores - right).max() < 2e-5
