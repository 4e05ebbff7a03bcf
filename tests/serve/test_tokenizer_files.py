"""Case A21: a checkpoint whose tokenizer is no tokenizer.json, from the source through conversion to what is served."""

import shutil
from pathlib import Path

import pytest
from support.small_tokenizers import save_internlm2, save_qwen

from pallasite import EngineConfig, GenerationConfig, pipeline
from pallasite.convert.convert import convert
from pallasite.convert.formats import open_source
from pallasite.serve.tokenizer import Tokenizer

WEIGHTS = Path(__file__).parents[1] / "data" / "golden" / "internlm2-tiny"
"""320 ids, as many as save_internlm2 has."""
TEXTS = ["Hello, world!", " leading", "def f(x):\n    return x\n", "聪明 👍", "<|im_start|>the<|im_end|>", "e\u0301"]
MESSAGES = [{"role": "user", "content": "the <|im_end|> dog"}]


def checkpoint(folder: Path) -> Path:
    """InternLM2 with random weights, as it is published: its code beside it, which leaves a trace where it is run."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(WEIGHTS / name, folder / name)
    for name in ("configuration_internlm2.py", "modeling_internlm2.py", "tokenization_internlm2.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return save_internlm2(folder, None)


def tokenizer_of(path: Path, tmp_path: Path) -> Tokenizer:
    source = open_source(path)
    folder = tmp_path / "files"
    folder.mkdir()
    assert source.save_tokenizer(folder)
    loaded = Tokenizer.load(folder, source.info.config_json, source.info.generation_json)
    assert loaded is not None
    shutil.rmtree(folder)
    return loaded


@pytest.mark.parametrize("saved", [save_internlm2, save_qwen])
def test_a_converted_checkpoint_has_the_same_tokenizer(saved, tmp_path):
    source = checkpoint(tmp_path / "source")
    if saved is save_qwen:
        (source / "tokenizer.model").unlink()
        save_qwen(source, None)
    first = tokenizer_of(source, tmp_path)
    assert convert(source, tmp_path / "out", progress=False)["tokenizer"] is True
    assert not (source / "ran").exists()
    shutil.rmtree(source)
    second = tokenizer_of(tmp_path / "out", tmp_path)
    names = {"tokenizer.model"} if saved is save_internlm2 else {"qwen.tiktoken"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "arrays",
        "config.json",
        "manifest.json",
        "tokenizer_config.json",
        *names,
    }
    for text in TEXTS:
        ids = first.encode(text)
        assert second.encode(text) == ids
        assert second.decode(ids) == first.decode(ids)
    assert second.encode_chat(MESSAGES) == first.encode_chat(MESSAGES)
    assert (second.eos_ids, second.hidden_ids) == (first.eos_ids, first.hidden_ids)


def test_texts_are_answered_from_source_and_conversion_alike(tmp_path):
    """With the built-in template, its stop tokens, and <s> in front as of a raw prompt; the code is never run."""
    source = checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", progress=False)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the dog"}]
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    config = GenerationConfig(max_new_tokens=12, ignore_eos=True)
    answers = []
    for path in (source, tmp_path / "out"):
        with pipeline(path, EngineConfig(max_batch_size=1, session_len=256, max_prefill_token_num=64)) as pipe:
            answers.append(pipe(messages, config))
            assert pipe(rendered, config, do_preprocess=False).token_ids == answers[-1].token_ids
            assert pipe.frontend.eos_ids == (2, *pipe.frontend.tokenizer.eos_ids[1:])
    assert answers[0] == answers[1]
    assert answers[0].text
    assert not (source / "ran").exists()
