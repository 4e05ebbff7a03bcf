"""Conversion streams: anonymous memory grows by a few tensors, not by the model."""

import json
import subprocess
import sys

import numpy as np

MB = 1 << 20
LAYERS, HIDDEN, MLP, VOCAB = 6, 2048, 8192, 8192
"""Embedding, head and the MLP's matrices are 64 MB each in float32; the whole model is 1.5 GB."""

MEASURES = """
import sys, threading, time
from pallasite.convert.convert import convert

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def sample():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.005)

peak = start = anonymous()
threading.Thread(target=sample, daemon=True).start()
convert(sys.argv[1], sys.argv[2], progress=False)
print(peak - start)
"""


def write_model(folder) -> tuple[int, int]:
    """A Llama of random weights written straight to its file. Returns bytes of all tensors, and of the largest."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "max_position_embeddings": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 16,
        "vocab_size": VOCAB,
        "dtype": "float32",
    }
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (HIDDEN, HIDDEN) for n in "qkvo"}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (MLP, HIDDEN) for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (HIDDEN, MLP)
        shapes |= {f"{layer}{n}.weight": (HIDDEN,) for n in ("input_layernorm", "post_attention_layernorm")}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(rng.random(shape, np.float32).data)
    return end, 4 * VOCAB * HIDDEN


def test_memory_does_not_grow_with_the_model(tmp_path):
    total, largest = write_model(tmp_path / "hf")
    bound = 3 * largest + 1024 * MB
    assert total > 1.2 * bound  # or the test could not fail
    command = [sys.executable, "-c", MEASURES, tmp_path / "hf", tmp_path / "out"]
    growth = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"grew by {growth / MB:.0f} MB; the bound is {bound / MB:.0f} MB, the model {total / MB:.0f} MB")
    assert growth <= bound
