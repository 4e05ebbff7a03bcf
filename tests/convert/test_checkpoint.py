"""Our checkpoint: what goes in comes out, whoever reads it, and damage is named."""

import json
import os
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.convert.int4 import Int4Tensor


def assert_equal(a, b, name=""):
    """Two tensors are the same in every bit and dtype."""
    assert type(a) is type(b), name
    if isinstance(a, Int4Tensor):
        assert (a.group_size, a.shape) == (b.group_size, b.shape)
        for field in ("packed", "scales", "zeros", "minimums"):
            x, y = getattr(a, field), getattr(b, field)
            assert (x is None) == (y is None), name
            if x is not None:
                assert_equal(x, y, f"{name}.{field}")
    else:
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.fixture
def checkpoint(tmp_path, config, tensors, write_hf):
    """A small checkpoint of ours."""
    convert(write_hf(tmp_path / "source", config, tensors), tmp_path / "checkpoint", progress=False)
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_come_back_exactly(tmp_path, config, tensors, write_hf, dtype):
    tensors = {name: array.astype(dtype) for name, array in tensors.items()}
    tensors["model.norm.weight"][:] = 0  # a chunk of zeros is one that TensorStore might leave out
    source = open_source(write_hf(tmp_path / "hf", config, tensors))
    manifest = convert(tmp_path / "hf", tmp_path / "out", progress=False)
    opened = open_source(tmp_path / "out")
    assert opened.info.config == source.info.config
    assert opened.info.specs == source.info.specs
    for name in source.info.specs:
        assert_equal(source.read(name), opened.read(name), name)
    assert manifest["bytes"] == sum(source.read(name).nbytes for name in source.info.specs)
    assert manifest["quantization"] is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_of_gguf_comes_back_exactly(tmp_path, config, tensors, write_gguf, kind):
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors, kind))
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    opened = open_source(tmp_path / "out")
    assert opened.info.group_sizes == source.info.group_sizes
    assert opened.info.config == source.info.config
    for name in source.info.specs:
        assert_equal(source.read(name), opened.read(name), name)


@pytest.mark.parametrize("tensors_at_once", [1, 1 << 30])
def test_several_partial_saves(tmp_path, config, tensors, write_hf, monkeypatch, tensors_at_once):
    monkeypatch.setattr("pallasite.convert.writer.PENDING_BYTES", tensors_at_once)
    source = open_source(write_hf(tmp_path / "hf", config | {"num_hidden_layers": 2}, tensors))
    convert(tmp_path / "hf", tmp_path / "out", progress=False)
    opened = open_source(tmp_path / "out")
    for name in source.info.specs:
        assert_equal(source.read(name), opened.read(name), name)


def test_orbax_itself_reads_the_arrays(checkpoint):
    opened = open_source(checkpoint)
    arrays = ocp.load(checkpoint / "arrays")
    assert set(arrays) == set(opened.info.specs)
    for name in opened.info.specs:
        np.testing.assert_array_equal(arrays[name], opened.read(name))


def test_the_number_of_devices_does_not_matter(checkpoint):
    """Written under one device, read under four, and the other way round."""
    script = (
        "import sys, jax; from pallasite.convert.convert import convert; "
        "from pallasite.convert.formats import open_source; "
        "assert jax.device_count() == 4; s = open_source(sys.argv[1]); "
        "print(sum(float(abs(s.read(n)).sum(dtype='float64')) for n in s.info.specs)); "
        "convert(sys.argv[1], sys.argv[2], progress=False)"
    )
    again = checkpoint.with_name("again")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", script, checkpoint, again], env=env, capture_output=True, text=True, check=True
    )
    a, b = open_source(checkpoint), open_source(again)
    assert float(run.stdout) == sum(float(abs(a.read(n)).sum(dtype="float64")) for n in a.info.specs)
    for name in a.info.specs:
        assert_equal(a.read(name), b.read(name), name)


@pytest.mark.parametrize("how", ["cp -r", "tar", "moved"])
def test_a_copy_loads_and_needs_neither_original_nor_source(checkpoint, tmp_path, how):
    expected = {name: open_source(checkpoint).read(name) for name in open_source(checkpoint).info.specs}
    copy = tmp_path / "elsewhere" / "copy"
    copy.parent.mkdir()
    match how:
        case "cp -r":
            subprocess.run(["cp", "-r", checkpoint, copy], check=True)
        case "tar":
            shutil.unpack_archive(shutil.make_archive(str(tmp_path / "a"), "tar", checkpoint), copy, filter="data")
        case "moved":
            checkpoint.rename(copy)
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.rmtree(tmp_path / "source")
    opened = open_source(copy)
    for name, tensor in expected.items():
        assert_equal(opened.read(name), tensor, name)


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_another_format_or_version_is_refused(checkpoint):
    edit(checkpoint / "manifest.json", format_version=3)
    with pytest.raises(ValueError, match=r"manifest\.json: format version 3 is unknown; this pallasite reads 1 and 2"):
        open_source(checkpoint)
    edit(checkpoint / "manifest.json", format="webmanifest")
    with pytest.raises(ValueError, match="format is 'webmanifest'"):
        open_source(checkpoint)


def test_a_configuration_that_does_not_fit_is_refused_with_all_differences(checkpoint):
    edit(checkpoint / "config.json", num_hidden_layers=3, vocab_size=81)
    with pytest.raises(
        ValueError, match=r"missing tensors \(9\): layers\.2.*wrong shapes \(2\): embed\.weight"
    ) as error:
        open_source(checkpoint)
    assert "head.weight: [64, 80], expected [64, 81]" in str(error.value)


def test_an_array_that_the_manifest_has_and_the_files_lack(checkpoint):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = manifest["tensors"]["layers.0.attn.q.weight"]
    entry |= {"dtype": "int4", "group_size": 32, "scales": "float16", "offset": "zeros"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"missing arrays \(3\): layers\.0\.attn\.q\.weight\.packed"):
        open_source(checkpoint)


def test_a_dtype_that_differs_from_the_manifest(checkpoint):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["tensors"]["norm.weight"]["dtype"] = "float16"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"array 'norm\.weight' is float32 \[64\]; the manifest says float16"):
        open_source(checkpoint).read("norm.weight")


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_arrays_are_named(checkpoint, damage):
    """Every data file in turn: opening or reading says so, or the file was not needed; no damage passes for weights."""
    opened = open_source(checkpoint)
    original = {name: opened.read(name) for name in opened.info.specs}
    files = [f for f in (checkpoint / "arrays").rglob("*") if f.is_file() and f.parent.name == "d"]
    errors = []
    for file in files:
        whole = file.read_bytes()
        if damage == "truncate":
            file.write_bytes(whole[: len(whole) // 2])
        else:
            file.unlink()
        try:
            opened = open_source(checkpoint)
            for name, tensor in original.items():
                assert_equal(opened.read(name), tensor, name)
        except ValueError as error:
            errors.append(str(error))
        file.write_bytes(whole)
    assert errors
    assert all("damaged" in error and str(checkpoint) in error for error in errors)


def test_without_its_arrays(checkpoint):
    shutil.rmtree(checkpoint / "arrays")
    with pytest.raises(ValueError, match="holds no whole Orbax checkpoint"):
        open_source(checkpoint)
