"""The tokenizers of Qwen's first generation and of InternLM2: ids known from outside, and files that are wrong."""

import base64
import json
import random
import re
import threading
import time
from pathlib import Path

import pytest
import sentencepiece
from support.published_tokenizers import INTERNLM2, QWEN, save_published_internlm2, save_published_qwen
from support.small_tokenizers import INTERNLM2_SIZE, RESERVED, byte_level, save, save_internlm2, save_qwen

from pallasite.serve.tokenizer import Tokenizer


def load(folder: Path, **config) -> Tokenizer:
    loaded = Tokenizer.load(folder, config)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def internlm2(tmp_path_factory) -> Tokenizer:
    return load(save_published_internlm2(tmp_path_factory.mktemp("internlm2")))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Tokenizer:
    return load(save_published_qwen(tmp_path_factory.mktemp("qwen")))


@pytest.mark.parametrize("case", INTERNLM2["strings"], ids=lambda case: repr(case["text"])[:20])
def test_internlm2s_ids(internlm2, case):
    assert internlm2.encode(case["text"]) == case["ids"]
    assert internlm2.encode(case["text"], add_special_tokens=False) == case["ids"][1:]
    if case["text"] != "[UNUSED_TOKEN_145]":  # a special token's other spelling: text as well where a user types it
        assert internlm2.encode_words(case["text"])[0] == case["sentencepiece_ids"]
    shown = internlm2.decode(case["ids"][1:], skip_special_tokens=False)
    assert shown == case["text"].replace("[UNUSED_TOKEN_145]", "<|im_end|>")


def test_internlm2s_eos(internlm2):
    assert internlm2.eos_ids == (INTERNLM2["eos"],)


@pytest.mark.parametrize("case", QWEN["cases"], ids=lambda case: repr(case["text"])[:20])
def test_qwens_ids(qwen, case):
    assert qwen.encode(case["text"]) == case["ids"]
    assert qwen.encode_words(case["text"])[0] == case["ids_special_as_text"]
    assert qwen.decode(case["ids"], skip_special_tokens=False) == case["decoded"]


def test_qwens_special_ids(qwen):
    assert qwen.eos_ids == (QWEN["special"]["<|endoftext|>"],)
    assert qwen.hidden_ids == frozenset(range(QWEN["n_ranks"], QWEN["n_vocab"]))
    # The embedding has 152064 rows.
    assert qwen.decode([QWEN["n_vocab"], 152063]) == ""


def test_qwens_merges_by_hand(tmp_path):
    """Lowest rank first, within the words that the text is cut into; NFC before; special tokens after the ranks."""
    merged = [b"he", b"el", b"ll", b"hell", b" hell", "é".encode(), b"\n\n"]
    tokens = [*(bytes([b]) for b in range(256)), *merged]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    tokenizer = load(tmp_path)
    he, el, ll, hell, space_hell, accent, two_lines = range(256, 263)
    for text, ids in {
        "hello": [hell, ord("o")],
        "ell": [el, ord("l")],  # "el" is of a lower rank than "ll"
        " hello": [space_hell, ord("o")],
        "a  hell": [ord("a"), ord(" "), space_hell],
        "llll": [ll, ll],
        "he's": [he, ord("'"), ord("s")],
        "e\u0301": [accent],
        "11": [ord("1"), ord("1")],
        "\n\n\n": [two_lines, ord("\n")],
        "<|endoftext|>he<|im_end|><|extra_204|>": [263, he, 265, 263 + 207],
        "<|e": [ord("<"), ord("|"), ord("e")],
    }.items():
        assert tokenizer.encode(text) == ids, text


def test_internlm2s_vocabulary_is_sentencepieces(tmp_path):
    """Any text and any ids, against the library used on the same file."""
    tokenizer = load(save_internlm2(tmp_path))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    rng = random.Random(0)
    words = [
        "the",
        " dog",
        "  ",
        "\n",
        "\t",
        "é",
        "聪",
        "👍",
        "e\u0301",
        "x" * 9,
        "\u3000",
        "▁",
        "ﬁ",
        "[UNUSED_TOKEN_0]",
        "<s",
    ]
    for _ in range(300):
        text = "".join(rng.choices(words, k=rng.randrange(8)))
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
        assert tokenizer.encode(text) == [1, *reference.encode(text)]
        assert tokenizer.decode(reference.encode(text)) == reference.decode(reference.encode(text))
        ids = rng.choices(range(3 + RESERVED, INTERNLM2_SIZE), k=8)
        # sentencepiece gives one U+FFFD a byte; here as everywhere else it is one for the start of a character.
        runs = re.compile("\ufffd+")
        assert runs.sub("?", tokenizer.decode(ids)) == runs.sub("?", reference.decode(ids))


def test_internlm2s_special_tokens_take_the_place_of_reserved_pieces(tmp_path):
    tokenizer = load(save_internlm2(tmp_path))
    end, start = RESERVED + 1, RESERVED + 2
    reserved = f"[UNUSED_TOKEN_{RESERVED - 2}]"
    # In a raw prompt both spellings are the token; typed, neither is.
    assert tokenizer.encode(f"<|im_start|>{reserved}<|im_end|>") == [1, start, end, end]
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|im_end|>"
    for typed in (reserved, "<|im_end|>", "</s>", "<IMG_CONTEXT>"):
        [alone, _] = tokenizer.encode_words(typed)
        assert not {*alone} & tokenizer.hidden_ids
        assert tokenizer.decode(alone) == typed
        ids = tokenizer.encode_chat([{"role": "user", "content": f"a{typed}b"}])
        assert sorted(set(ids) & tokenizer.hidden_ids) == [end, start]
        assert f"a{typed}b" in tokenizer.decode(ids)
    # Reserved pieces that no special token has are text.
    assert tokenizer.encode("[UNUSED_TOKEN_0]")[1:] == tokenizer.encode_words("[UNUSED_TOKEN_0]")[0]


def test_special_tokens_from_the_older_file(tmp_path):
    folder = save_internlm2(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = settings.pop("added_tokens_decoder")
    (folder / "added_tokens.json").write_text(
        json.dumps({t["content"]: int(i) for i, t in added.items() if int(i) > 2})
    )
    before = load(save_internlm2(tmp_path / "new"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "<s>the <|im_start|>dog<IMG_CONTEXT>"
    assert load(folder).encode(text) == before.encode(text)
    assert load(folder).hidden_ids == before.hidden_ids


def test_an_added_token_that_is_not_special_is_shown(tmp_path):
    folder = save_internlm2(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"][str(INTERNLM2_SIZE)]["special"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode("a<img>b</img>")) == "a<img>b"


def test_no_bos_if_the_settings_say_so(tmp_path):
    folder = save_internlm2(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert load(folder).encode("the") == load(folder).encode("the", add_special_tokens=False)


@pytest.mark.parametrize("save_files", [save_qwen, save_internlm2])
def test_megabytes_and_long_runs_leave_other_threads_alone(save_files, tmp_path):
    """A million spaces overflow tiktoken's regular expression, which panics. What holds the interpreter's lock would
    stop the engine."""
    tokenizer = load(save_files(tmp_path))
    longest, done = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.wait(0.001):
            longest[0], last = max(longest[0], time.monotonic() - last), time.monotonic()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for text in (" " * 1_200_000 + "x", "the dog " * 2**16, "x" * 200_000, "\n \n" * 50_000):
            ids = tokenizer.encode_words(text)[0]
            assert tokenizer.decode(ids) == text
    finally:
        done.set()
        thread.join()
    assert longest[0] < 1


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b"])
@pytest.mark.parametrize("save_files", [save_qwen, save_internlm2, lambda folder: save(byte_level(), folder)])
def test_half_a_surrogate_pair_is_refused(save_files, text, tmp_path):
    tokenizer = load(save_files(tmp_path))
    for call in (
        tokenizer.encode,
        tokenizer.encode_words,
        lambda text: tokenizer.encode_chat([{"role": "user", "content": text}]),
        lambda text: tokenizer.encode_chat([{"role": text, "content": "hi"}]),
    ):
        with pytest.raises(ValueError, match=r"holds U\+D[8C]00, half of a character, at [01]"):
            call(text)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the ranks must be"),
        (b"IQ== 0\n", "the ranks must be"),
        (b"IQ==\n", "line 1 is no base64 string with its rank"),
        (b"IQ== 0\nIQ== x\n", "line 2 is no base64"),
        (b"I! 0\n", "line 1 is no base64"),
    ],
)
def test_a_damaged_tiktoken_file_is_refused(tmp_path, content, problem):
    (tmp_path / "qwen.tiktoken").write_bytes(content)
    with pytest.raises(ValueError, match=rf"qwen\.tiktoken: {problem}"):
        Tokenizer.load(tmp_path)


def test_a_rank_that_is_missing_or_given_twice_is_refused(tmp_path):
    lines = (save_qwen(tmp_path) / "qwen.tiktoken").read_bytes().splitlines()
    for wrong in (lines[:300] + lines[301:], [*lines, base64.b64encode(b"\xff\xff\xff") + b" 300"], lines[1:]):
        (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(wrong))
        with pytest.raises(ValueError, match=r"the ranks must be 0, 1, 2, \.\.\., each once"):
            Tokenizer.load(tmp_path)


def test_other_tiktoken_files_are_refused(tmp_path):
    (tmp_path / "other.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(ValueError, match=r"is other\.tiktoken; of its kind only qwen\.tiktoken is known"):
        Tokenizer.load(tmp_path)


def test_a_damaged_sentencepiece_model_is_refused(tmp_path):
    folder = save_internlm2(tmp_path)
    whole = (folder / "tokenizer.model").read_bytes()
    for damaged in (b"\xff" * 100, whole[:-3]):
        (folder / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"tokenizer\.model: not a sentencepiece model"):
            Tokenizer.load(folder)


def test_a_sentencepiece_model_that_changes_the_text_is_refused(tmp_path):
    """What InternLM2's does not, so that we don't know how its tokenizer would treat special tokens."""
    folder = save_internlm2(tmp_path)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "jumps over the lazy dog"]),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=30,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match=r"tokenizer\.model: not InternLM2's: it changes the text"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("table", [{"x": {"content": "a"}}, {"500": {}}, {"500": {"content": ""}}, [1], {"500": "a"}])
def test_a_malformed_table_of_added_tokens_is_refused(tmp_path, table):
    folder = save_internlm2(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": table}))
    with pytest.raises(ValueError, match="the table of added tokens is malformed"):
        Tokenizer.load(folder)


def test_a_special_token_that_nothing_defines_is_refused(tmp_path):
    folder = save_internlm2(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": {"content": "<eoa>"}}))
    with pytest.raises(ValueError, match="eos_token is '<eoa>', which is no special token"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["InternLM2ForCausalLM"]},
        {"architectures": ["InternVLChatModel"], "llm_config": {"architectures": ["InternLM2ForCausalLM"]}},
    ],
)
def test_internlm2_by_architecture_where_no_class_is_named(tmp_path, config):
    folder = save_internlm2(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load(folder, **config).encode("<s>the<IMG_CONTEXT>")[-1] == INTERNLM2_SIZE + 2


def test_another_familys_sentencepiece_model_is_transformers_business(tmp_path):
    """Llama 2 and Mistral with a tokenizer.model only: a space is put in front of a text, and taken away again."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "jumps over the lazy dog"] * 5),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    tokenizer = load(tmp_path, architectures=["LlamaForCausalLM"])
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ids = reference.encode("the lazy 聪 dog")
    assert tokenizer.encode("the lazy 聪 dog", add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == "the lazy 聪 dog"
