"""The `pallasite` command as a whole. What each command does is tested with its room."""

import os
import re
import subprocess
import sys

import pytest

import pallasite
from pallasite import cli


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "{missing}"],
        ["convert", "{missing}", "{new}"],
        ["serve", "{missing}", "--port", "0"],
        ["convert", "{model}", "{new}", "--quantize", "int3"],
        ["serve", "{model}", "--port", "0", "--cache-block-seq-len", "17"],
        ["chat", "--port", "1", "--once", "hello"],
        ["chat", "--once", " "],
        ["chat", "--once", "a", "--seed", "-1"],
        ["chat", "--once", "a", "--max-new-tokens", "99999999999"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, checkpoint, tmp_path, capfd):
    """The line names what is wrong, and there is no traceback."""
    places = {"missing": tmp_path / "nowhere\n at all", "new": tmp_path / "new", "model": checkpoint}
    assert cli.main([a.format(**places) for a in arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("pallasite: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    wanted = {"{missing}": "nowhere at all", "int3": "'int3'", "17": "17", "1": "127.0.0.1:1"} | {
        " ": "--once is ' '",
        "-1": "random_seed is -1; it must be an integer in 0..18446744073709551615",
        "99999999999": "max_new_tokens is 99999999999; it must be an integer in 1..2147483647",
    }
    assert any(text in err for word, text in wanted.items() if word in arguments)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], ["COMMAND"]),
        (["polish"], ["'polish'", "convert"]),
        (["convert"], ["SRC, DST"]),
        (["serve", "x", "--tp", "two"], ["--tp", "'two'"]),
        (["serve", "x", "--cache-max-entry-count", "few"], ["'few' is neither a share nor a number of pages"]),
        (["chat", "--onc"], ["--once"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_usage(arguments, wanted, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"pallasite: error: .+ \(pallasite( \w+)? --help tells more\)\n", err)
    assert all(word in err for word in wanted)


def test_a_reader_that_leaves(checkpoint):
    """`pallasite inspect model | head -1`: no complaint, and no exit status of success."""
    command = [sys.executable, "-m", "pallasite.cli", "inspect", str(checkpoint)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("pallasite.convert.cli.run_inspect", interrupt)
    assert cli.main(["inspect", "anything"]) == 130
    assert capsys.readouterr().err == "pallasite: interrupted\n"


def test_version_and_help(capsys):
    for option, found in (
        ("--version", f"pallasite {pallasite.__version__}"),
        ("--help", "example: pallasite convert"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.main([option])
        assert left.value.code == 0
        assert found in capsys.readouterr().out


def test_help_needs_no_jax():
    """Libraries that take seconds to import are imported when a command runs."""
    code = (
        "import sys; from pallasite import cli; cli.parser().format_help()\n"
        "print([name for name in ('jax', 'transformers', 'flax', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_inspect(checkpoint, capsys):
    assert cli.main(["inspect", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "320, tied embeddings" in out
