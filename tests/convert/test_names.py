"""Key tables: our names to the format's, and the tensors that hold several of ours."""

import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pallasite.convert.formats import files, open_source
from pallasite.convert.formats.names import Place, places, stored_specs
from pallasite.models.config import TensorSpec
from pallasite.models.internlm2 import HF_KEYS, columns_by_group
from pallasite.models.tensors import tensor_specs


@pytest.fixture
def internlm2(golden):
    source = open_source(golden / "internlm2-tiny")
    yield source
    source.close()


def test_runs_are_the_columns_in_our_order():
    columns = np.asarray([4, 5, 6, 0, 1, 9])
    assert list(Place("t", columns).runs(6)) == [(4, 7), (0, 2), (9, 10)]
    assert list(Place("t").runs(6)) == [(0, 6)]


def test_parts_of_a_fused_tensor_are_told_with_their_columns(internlm2):
    config = dataclasses.replace(internlm2.info.config, qkv_bias=True)
    specs = tensor_specs(config)
    found = places(HF_KEYS, specs, config)
    for name, leaf in {"weight": (64, 128), "bias": (128,)}.items():
        parts = [found[f"layers.1.attn.{part}.{name}"] for part in "qkv"]
        assert {part.key for part in parts} == {f"model.layers.1.attention.wqkv.{name}"}
        np.testing.assert_array_equal(np.sort(np.concatenate([part.columns for part in parts])), np.arange(128))
        assert stored_specs(found, specs)[parts[0].key].shape == leaf
    assert found["layers.1.attn.o.weight"] == Place("model.layers.1.attention.wo.weight")


def test_a_table_with_a_hole_is_a_defect(internlm2):
    specs = {"layers.0.attn.extra.weight": TensorSpec((1, 1), "linear")}
    with pytest.raises(KeyError, match=r"no pattern of the key table gives 'layers.0.attn.extra.weight'"):
        places(HF_KEYS, specs, internlm2.info.config)


def test_internlm2s_wqkv_by_hand(internlm2, golden):
    """2 kv heads of 16: rows are 2 query heads, key head, value head, twice."""
    stored = load_file(golden / "internlm2-tiny" / "model.safetensors")
    wqkv = stored["model.layers.1.attention.wqkv.weight"].reshape(8, 16, 64)
    heads = {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}
    for part, of in heads.items():
        read = internlm2.read(f"layers.1.attn.{part}.weight")
        np.testing.assert_array_equal(read, wqkv[of].reshape(-1, 64).T)


def test_only_the_rows_of_a_part_are_read(internlm2, monkeypatch):
    """The fused tensor is not read three times over, nor kept."""
    read = []
    rows = files.Shards.rows
    monkeypatch.setattr(files.Shards, "rows", lambda *a: (read.append(a[2:]), rows(*a))[1])
    for part in "qkv":
        internlm2.read(f"layers.0.attn.{part}.weight")
    assert sum(end - first for first, end in read) == 128


def test_a_fused_tensor_of_the_wrong_size_is_refused(tmp_path, golden):
    key = "model.layers.0.attention.wqkv.weight"
    tensors = load_file(golden / "internlm2-tiny" / "model.safetensors")
    save_file(tensors | {key: tensors[key][:-16].copy()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((golden / "internlm2-tiny" / "config.json").read_text())
    problem = f"wrong shapes (1): {key}: [112, 64], expected [128, 64]"
    with pytest.raises(ValueError, match=re.escape(problem)):
        open_source(tmp_path)


def test_groups_of_one_head(internlm2):
    config = dataclasses.replace(internlm2.info.config, num_kv_heads=4)
    q, k, v = columns_by_group(config)
    np.testing.assert_array_equal(
        np.stack([q[::16], k[::16], v[::16]]), [[0, 48, 96, 144], [16, 64, 112, 160], [32, 80, 128, 176]]
    )


@pytest.mark.parametrize(
    ("case", "head", "embed"),
    [
        ("internlm2-tiny", "output.weight", "model.tok_embeddings.weight"),
        ("qwen1-tiny", "lm_head.weight", "transformer.wte.weight"),
    ],
)
def test_a08_tied_embeddings_under_the_familys_names(tmp_path, golden, case, head, embed):
    """Tied with a head that differs: refused; with the same or none: one matrix. Untied without a head: missing."""
    tensors = load_file(golden / case / "model.safetensors")
    config = json.loads((golden / case / "config.json").read_text())

    def write(tied: bool, head_weight: np.ndarray | None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        rest = {name: tensor for name, tensor in tensors.items() if name != head}
        save_file(rest if head_weight is None else rest | {head: head_weight}, tmp_path / "model.safetensors")
        return open_source(tmp_path)

    with pytest.raises(ValueError, match=f"tie_word_embeddings is true, and {head} differs from {embed}"):
        write(True, tensors[head])
    assert "head.weight" not in write(True, tensors[embed].copy()).info.specs
    assert "head.weight" not in write(True, None).info.specs
    with pytest.raises(ValueError, match=rf"missing tensors \(1\): {head}"):
        write(False, None)
