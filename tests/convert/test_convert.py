"""The rules of a conversion: which tensors become INT4, dtypes, what is written beside them, what is refused."""

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.int4 import Int4Tensor
from pallasite.convert.produce import cast
from pallasite.convert.quantize import rtn


@pytest.fixture
def hf(tmp_path, config, tensors, write_hf):
    return write_hf(tmp_path / "hf", config, tensors)


def test_quantizing_touches_linear_layers_only(tmp_path, hf):
    source = open_source(hf)
    manifest = convert(hf, tmp_path / "out", quantize="int4", group_size=64, progress=False)
    opened = open_source(tmp_path / "out")
    for name, spec in source.info.specs.items():
        stored = opened.read(name)
        if spec.kind == "linear":
            expected = rtn.quantize(name, source.read(name), 64)
            assert isinstance(stored, Int4Tensor)
            np.testing.assert_array_equal(stored.packed, expected.packed)
            np.testing.assert_array_equal(stored.scales, expected.scales)
        else:
            np.testing.assert_array_equal(stored, source.read(name))
    summary = manifest["quantization"]
    assert (summary["method"], summary["group_size"], summary["tensors"]) == ("rtn", 64, 14)
    # The MLP's 96 rows are one and a half groups.
    assert summary["notes"] == ["K=96 is 1.5 groups of 64: the last group has 32 rows (2 tensors)"]


def test_the_default_group_is_128(tmp_path, hf):
    assert convert(hf, tmp_path / "out", quantize="int4", progress=False)["quantization"]["group_size"] == 128


def test_the_real_model_is_ragged_at_128(tmp_path, smollm2_gguf):
    manifest = convert(smollm2_gguf, tmp_path / "out", quantize="int4", dtype="bfloat16", progress=False)
    assert manifest["quantization"]["notes"] == ["K=576 is 4.5 groups of 128: the last group has 64 rows (180 tensors)"]
    assert manifest["tokenizer"] is True
    stored = open_source(tmp_path / "out").read("layers.7.attn.o.weight")
    exact = open_source(smollm2_gguf).read("layers.7.attn.o.weight").dequantize()
    expected = rtn.quantize("", exact, 128)  # from the dequantized values
    np.testing.assert_array_equal(stored.packed, expected.packed)
    assert np.abs(stored.dequantize() - exact).max() <= stored.scales.max()


def test_dequantizing_expands_to_the_dtype(tmp_path, config, tensors, write_gguf):
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors, "Q4_1"))
    exact = source.read("layers.0.mlp.up.weight").dequantize()
    convert(tmp_path / "m.gguf", tmp_path / "auto", dequantize=True, progress=False)
    stored = open_source(tmp_path / "auto").read("layers.0.mlp.up.weight")
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, exact)
    convert(tmp_path / "m.gguf", tmp_path / "bf16", dequantize=True, dtype="bfloat16", progress=False)
    opened = open_source(tmp_path / "bf16")
    np.testing.assert_array_equal(opened.read("layers.0.mlp.up.weight"), exact.astype(ml_dtypes.bfloat16))
    assert set(opened.info.dtypes.values()) == {"bfloat16"}
    assert opened.info.config.dtype == "bfloat16"


def test_dtype_leaves_kept_int4_alone(tmp_path, config, tensors, write_gguf):
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors, "Q4_0"))
    convert(tmp_path / "m.gguf", tmp_path / "out", dtype="float16", progress=False)
    opened = open_source(tmp_path / "out")
    np.testing.assert_array_equal(
        opened.read("layers.0.attn.q.weight").packed, source.read("layers.0.attn.q.weight").packed
    )
    assert opened.read("embed.weight").dtype == np.float16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_casting(tmp_path, config, tensors, write_hf, dtype):
    config["torch_dtype"] = config.pop("dtype")
    write_hf(tmp_path / "hf", config, tensors)
    convert(tmp_path / "hf", tmp_path / "out", dtype=dtype, progress=False)
    opened = open_source(tmp_path / "out")
    assert opened.info.config.dtype == dtype
    assert "torch_dtype" not in opened.info.config_json
    expected = tensors["lm_head.weight"].T.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    np.testing.assert_array_equal(opened.read("head.weight"), expected)


def test_auto_keeps_each_tensor_as_it_is_stored(tmp_path, config, tensors, write_hf):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(ml_dtypes.bfloat16)
    convert(write_hf(tmp_path / "hf", config, tensors), tmp_path / "out", progress=False)
    dtypes = open_source(tmp_path / "out").info.dtypes
    assert (dtypes["norm.weight"], dtypes["head.weight"]) == ("float32", "bfloat16")


def test_a_cast_that_overflows_is_refused(tmp_path, config, tensors, write_hf, monkeypatch):
    monkeypatch.setattr("pallasite.convert.produce.CHUNK_BYTES", 1024)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = -70000
    write_hf(tmp_path / "hf", config, tensors)
    message = r"layers\.1\.mlp\.down\.weight: has the value 70000, and float16 ends at 65504"
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "hf", tmp_path / "out", dtype="float16", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    convert(tmp_path / "hf", tmp_path / "out", dtype="bfloat16", progress=False)


def test_infinities_of_the_source_pass_a_cast():
    w = np.array([1, np.inf, -np.inf, np.nan, 65504], np.float32)
    np.testing.assert_array_equal(cast("w", w, "float16"), w.astype(np.float16))


# What is written beside the arrays.


def test_files_of_the_tokenizer_travel_and_code_does_not(tmp_path, config, tensors, write_hf):
    trap = tmp_path / "ran"
    config["auto_map"] = {"AutoConfig": "configuration_trap.Trap"}
    config["text_config"] = {"auto_map": {"AutoModel": "gone.Gone"}, "kept": 1}
    hf = write_hf(tmp_path / "hf", config, tensors)
    for name in ("configuration_trap.py", "tokenization_qwen.py"):
        (hf / name).write_text(f"open({str(trap)!r}, 'w')")
    (hf / "qwen.tiktoken").write_text("IQ== 0\n")
    (hf / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["x.Y", None]}, "eos_token": "é"})
    )
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (hf / "training_args.bin").write_bytes(b"x")
    manifest = convert(hf, tmp_path / "out", progress=False)
    assert manifest["tokenizer"] is True
    shutil.rmtree(hf)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "arrays",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "qwen.tiktoken",
        "tokenizer_config.json",
    }
    assert not trap.exists()
    assert "auto_map" not in "".join(p.read_text() for p in (tmp_path / "out").glob("*.json"))
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"eos_token": "é"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"] == {"kept": 1}
    assert open_source(tmp_path / "out").info.config.eos_token_ids == (2, 5)


def test_a_checkpoint_without_a_tokenizer(tmp_path, hf):
    (hf / "special_tokens_map.json").write_text("{}")  # describes one, and is none
    assert convert(hf, tmp_path / "out", progress=False)["tokenizer"] is False
    assert not (tmp_path / "out" / "special_tokens_map.json").exists()


def test_the_manifest_names_the_source_and_no_machine(tmp_path, hf):
    manifest = convert(hf, tmp_path / "out", progress=False)
    assert manifest["source"] == {"name": "hf", "format": "hf"}
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    assert manifest["tensors"]["layers.0.mlp.up.weight"] == {"shape": [64, 96], "kind": "linear", "dtype": "float32"}


def test_a_checkpoint_of_ours_is_a_source(tmp_path, hf):
    convert(hf, tmp_path / "a", progress=False)
    manifest = convert(tmp_path / "a", tmp_path / "b", quantize="int4", group_size=32, progress=False)
    assert manifest["source"] == {"name": "a", "format": "pallasite"}
    convert(tmp_path / "b", tmp_path / "c", progress=False)
    b, c = open_source(tmp_path / "b"), open_source(tmp_path / "c")
    np.testing.assert_array_equal(b.read("layers.0.attn.q.weight").packed, c.read("layers.0.attn.q.weight").packed)


# What is refused, before any work.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "quantize is 'int8'; it must be one of int4"),
        ({"quantize": "int4", "group_size": 48}, "group_size is 48; it must be one of 32, 64, 128"),
        ({"quantize": "int4", "group_size": 0}, "group_size is 0; it must be one of 32, 64, 128"),
        ({"group_size": 64}, "group_size is 64, which needs quantize"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; it must be one of auto, float32, float16, bfloat16"),
        ({"quantize": "int4", "dequantize": True}, "quantize and dequantize exclude each other"),
        ({"quantize": "int4", "calibration": "a.txt"}, "calibration is 'a.txt', and quantize='int4' uses no"),
        ({"samples": 8}, "samples is '8', and quantize=None uses no calibration"),
        ({"length": 8}, "length is '8', and quantize=None uses no calibration"),
    ],
)
def test_options_that_are_refused(tmp_path, hf, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        convert(hf, tmp_path / "out", progress=False, **options)
    assert not (tmp_path / "out").exists()


def test_places_that_are_refused(tmp_path, hf):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    for dst, force, message in [
        (hf, True, "is the source or holds it"),
        (tmp_path, True, "is the source or holds it"),
        (tmp_path / "file", True, "is not a folder"),
        (tmp_path / "full", False, "exists and is not empty"),
        (tmp_path / "full", True, "is no checkpoint of ours, so --force does not replace it"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert(hf, dst, force=force, progress=False)
    assert (tmp_path / "full" / "thesis.txt").exists()
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        convert(tmp_path / "nothing", tmp_path / "out", progress=False)


def test_an_empty_folder_and_new_parents_are_fine_places(tmp_path, hf):
    (tmp_path / "empty").mkdir()
    convert(hf, tmp_path / "empty", progress=False)
    convert(hf, tmp_path / "a" / "b" / "c", progress=False)
    assert open_source(tmp_path / "empty").info == open_source(tmp_path / "empty").info
    assert open_source(tmp_path / "a" / "b" / "c").info.format == "pallasite"


def test_too_little_disk_is_found_before_the_work(tmp_path, hf, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(OSError, match="of disk, 1 MB are free"):
        convert(hf, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_cannot_be_rebuilt_is_refused_before_the_work(
    tmp_path, config, tensors, write_gguf, monkeypatch
):
    write_gguf(tmp_path / "m.gguf", config, tensors, metadata={"tokenizer.ggml.model": "llama"})
    monkeypatch.setattr("pallasite.convert.formats.gguf.GGUFSource.read", lambda self, name: pytest.fail("read"))
    with pytest.raises(ValueError, match="tokenizer model 'llama' is not supported"):
        convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)


def test_progress_goes_to_stderr_in_bytes(tmp_path, hf, capsys):
    convert(hf, tmp_path / "a")
    out, err = capsys.readouterr()
    assert out == ""
    assert "100%" in err
    assert "B/s" in err
    convert(hf, tmp_path / "b", progress=False)
    assert capsys.readouterr() == ("", "")
