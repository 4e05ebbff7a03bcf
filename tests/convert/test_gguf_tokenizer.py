"""Tokenizers rebuilt from GGUF metadata: the real one against golden ids, and small ones for the rules."""

import json

import pytest
from transformers import AutoTokenizer, Qwen2Tokenizer

from pallasite.convert.formats import open_source
from pallasite.convert.formats.gguf_metadata import Metadata
from pallasite.convert.formats.gguf_tokenizer import build_tokenizer

BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""The 256 characters that byte-level BPE writes for bytes; "Ġ" is the space, "Ċ" the line feed."""


def small(pre: str, **more) -> Metadata:
    """A tokenizer of 256 bytes, a few merges, three special tokens and one that a user added."""
    merged = ["ab", "abc", "ĠĠ", "12", "123"]
    merges = ["a b", "ab c", "Ġ Ġ", "1 2", "12 3"]
    tokens = ["<bos>", "<eos>", "<turn>", "[tool]", *BYTES, *merged]
    kinds = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    pairs = {"pre": pre, "model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges}
    pairs |= {"bos_token_id": 0, "eos_token_id": 1} | more
    return Metadata({f"tokenizer.ggml.{key}": value for key, value in pairs.items()})


def pieces(metadata: Metadata, text: str) -> list[str]:
    tokenizer = build_tokenizer(metadata)
    assert tokenizer is not None
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf, tmp_path_factory):
    """The real model's tokenizer, written and read again."""
    folder = tmp_path_factory.mktemp("tokenizer")
    assert open_source(smollm2_gguf).save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_golden_prompts(smollm2, golden):
    expected = json.loads((golden / "smollm2-135m-gguf" / "expected.json").read_text())
    assert len(expected["prompts"]) >= 5
    for prompt in expected["prompts"]:
        text = smollm2.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
        assert text == prompt["rendered"]
        assert smollm2(text)["input_ids"] == prompt["input_ids"]
        assert smollm2.decode(prompt["greedy_ids"]) == prompt["greedy_text"]


def test_a_long_text_comes_back(smollm2, golden):
    text = json.loads((golden / "smollm2-135m-gguf" / "expected.json").read_text())["nll_text"]["text"]
    assert smollm2.decode(smollm2(text)["input_ids"]) == text


def test_special_tokens(smollm2):
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.unk_token_id) == (1, 2, 0)
    assert smollm2("<|im_end|>")["input_ids"] == [2]
    assert smollm2.decode([1, 2], skip_special_tokens=True) == ""


def test_smollm_cuts_digits_first():
    # Two spaces between digits are one token here; where the words are cut first, the second belongs to " 1".
    assert pieces(small("smollm"), "1  123") == ["1", "ĠĠ", "1", "2", "3"]
    assert pieces(small("gpt-2"), "1  123") == ["1", "Ġ", "Ġ", "123"]


def test_llama_bpe_cuts_digits_by_three():
    assert pieces(small("llama-bpe", add_bos_token=False), "1231 abc") == ["123", "1", "Ġ", "abc"]


def test_llama_bpe_takes_whole_words_before_merges():
    metadata = small("llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("cab")  # no merge leads to it
    metadata["tokenizer.ggml.token_type"].append(1)
    assert pieces(metadata, "cab") == ["cab"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert pieces(metadata, "cab") == ["c", "ab"]


@pytest.mark.parametrize("text", ["1231 abc", "cab ABC it's  x\n\n y", "e\u0301 \u00e9", "  a  b\t12", "聪明 🇨🇳!?\r\n"])
def test_qwen2_against_transformers_own(text):
    metadata = small("qwen2")
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    own = Qwen2Tokenizer({t: i for i, t in enumerate(tokens)}, [tuple(m.split()) for m in merges], eos_token="<eos>")
    assert pieces(metadata, text) == own.convert_ids_to_tokens(own(text)["input_ids"])


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_as_the_file_says(tmp_path, pre, flag, added):
    tokenizer = build_tokenizer(small(pre, **({} if flag is None else {"add_bos_token": flag})))
    assert tokenizer is not None
    tokenizer.save_pretrained(tmp_path)
    for t in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        tokens = t.convert_ids_to_tokens(t("abc")["input_ids"])
        assert tokens == (["<bos>"] if added else []) + ["abc"]


def test_special_and_user_defined_tokens_are_never_split(tmp_path):
    tokenizer = build_tokenizer(small("gpt-2"))
    assert tokenizer is not None
    tokenizer.save_pretrained(tmp_path)
    for t in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = t("a[tool]<eos>b<turn>")["input_ids"]
        assert t.convert_ids_to_tokens(ids) == ["a", "[tool]", "<eos>", "b", "<turn>"]
        assert t.decode(ids) == "a[tool]<eos>b<turn>"
        assert t.decode(ids, skip_special_tokens=True) == "a[tool]b"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (small("refact"), "pre-tokenizer 'refact' is not supported"),
        (small("gpt-2", model="llama"), "tokenizer model 'llama' is not supported"),
        (small("gpt-2", token_type=[1]), "1 entries for 265 tokens"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(metadata, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(metadata)


def test_a_file_without_a_tokenizer(tmp_path, config, tensors, write_gguf):
    source = open_source(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert not source.save_tokenizer(tmp_path)
    assert not list(tmp_path.glob("*.json"))
