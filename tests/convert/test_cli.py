"""`pallasite convert` and `pallasite inspect`, as the top-level command calls them."""

import argparse
import json

import pytest

from pallasite.convert import cli
from pallasite.convert.convert import convert
from pallasite.convert.inspect import describe, human


def run(*arguments) -> int:
    """The exit code of a command line, without the program's name."""
    parser = argparse.ArgumentParser(prog="pallasite")
    cli.add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args([str(a) for a in arguments])
    return args.run(args)


@pytest.fixture
def hf(tmp_path, config, tensors, write_hf):
    return write_hf(tmp_path / "hf", config, tensors)


def test_convert(tmp_path, hf, capsys):
    assert run("convert", hf, tmp_path / "out", "--quantize", "int4", "--group-size", "64", "--dtype", "bfloat16") == 0
    out, err = capsys.readouterr()
    assert "LlamaForCausalLM, 21 tensors" in out
    assert "note: K=96 is 1.5 groups of 64" in out
    assert "converting" in err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["quantization"]["group_size"]) == ("bfloat16", 64)


def test_quiet_force_and_dequantize(tmp_path, config, tensors, write_gguf, capsys):
    write_gguf(tmp_path / "m.gguf", config, tensors, "Q4_1")
    assert run("convert", tmp_path / "m.gguf", tmp_path / "out", "--quiet") == 0
    with pytest.raises(ValueError, match="exists and is not empty; --force"):
        run("convert", tmp_path / "m.gguf", tmp_path / "out", "--quiet")
    assert run("convert", tmp_path / "m.gguf", tmp_path / "out", "--quiet", "--force", "--dequantize") == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["quantization"] is None


def test_bad_input_is_left_to_the_caller(tmp_path, hf):
    with pytest.raises(ValueError, match="group_size is 48"):
        run("convert", hf, tmp_path / "out", "--quantize", "int4", "--group-size", "48")
    with pytest.raises(FileNotFoundError, match="no such file"):
        run("inspect", tmp_path / "nothing")
    with pytest.raises(SystemExit) as error:
        run("convert", hf)
    assert error.value.code == 2


def test_help_shows_an_example(capsys):
    for command in ("convert", "inspect"):
        with pytest.raises(SystemExit) as error:
            run(command, "--help")
        assert error.value.code == 0
        assert f"pallasite {command} " in capsys.readouterr().out.split("example")[1]


def test_inspect_of_a_checkpoint(tmp_path, hf, capsys):
    convert(hf, tmp_path / "out", quantize="int4", group_size=64, progress=False)
    assert run("inspect", tmp_path / "out") == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    fields = {key: value.strip() for key, value in lines.items()}
    assert fields["architecture"] == "LlamaForCausalLM, 0.1 M parameters"
    assert fields["attention"] == "4 heads, 2 kv heads of 16"
    assert fields["vocabulary"] == "80, untied embeddings"
    assert fields["tensors"].startswith("21 (14 int4, 7 float32), ")
    assert fields["quantization"] == "INT4, rtn, groups of 64"
    assert fields["tokenizer"] == "no"
    assert fields["converted from"].startswith("hf (hf), by pallasite ")
    assert "K=96 is 1.5 groups of 64: the last group has 32 rows" in describe(tmp_path / "out")


def test_inspect_of_sources(tmp_path, hf, config, tensors, write_gguf):
    assert "tensors       21 (21 float32), 288.0 kB" in describe(hf)
    text = describe(write_gguf(tmp_path / "m.gguf", config, tensors, "Q4_1"))
    assert "21 (16 Q4_1, 5 float32)" in text
    assert "layers.0.mlp.down.weight  [96, 64]  Q4_1  3.8 kB" in text  # 5 bits a weight


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("internlm2-tiny", ["2 kv heads of 16\n", "64, rope theta 10000, dynamic x2\n"]),
        ("qwen1-tiny", ["4 kv heads of 16, logn past 32\n", "32, rope theta 10000, NTK past 32\n"]),
        ("qwen3-tiny", ["2 kv heads of 32, q and k normed\n", "256, rope theta 1e+06\n"]),
        ("mistral-swa-tiny", ["2 kv heads of 16, a window of 16 in 2 layers\n"]),
    ],
)
def test_inspect_tells_what_a_family_does(golden, case, lines):
    text = describe(golden / case)
    for line in lines:
        assert line in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98_362_432, "98.4 MB"), (29_000_000_000, "29.0 GB")],
)
def test_bytes_for_people(nbytes, text):
    assert human(nbytes) == text
