"""Text as it streams: whole characters, every space, and nothing of a stop word."""

import random
import time
import unicodedata

import pytest
from support.small_tokenizers import SAVERS, byte_level, load

from pallasite.serve.detokenizer import CONTEXT_TOKENS, MAX_HELD_TOKENS, AnswerText, Detokenizer, StopWords
from pallasite.serve.tokenizer import Tokenizer
from pallasite.serve.tokenizer_bytes import ByteCodec

CHARACTERS = ["聪", "👨‍👩‍👧‍👦", "🇨🇳", "e\u0301", "𠮷", "naïve 聪明 👍🏽!", "\ufffd", "a\u200db", "한국어 텍스트"]
SPACES = [
    "a    b",
    "\tx",
    " leading",
    "\n\n  indented",
    "Hello world",
    "  ",
    "\n",
    " a ",
    "def f():\n    return 1\n\n\tx = 2\n",
]
PROMPTS = ["", "Hello", "Say:", "聪明", "a ", "The quick brown fox jumps over the lazy dog"]


@pytest.fixture(scope="module", params=list(SAVERS))
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    loaded = Tokenizer.load(SAVERS[request.param](tmp_path_factory.mktemp(request.param)))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory) -> Tokenizer:
    return load(byte_level(), tmp_path_factory.mktemp("bytes"))


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    """The deltas of an answer, the last one what finish() still had."""
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def whole(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    """decode(prompt + output) minus decode(prompt)."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    assert text.startswith(before)
    return text[len(before) :]


def continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that goes on from something: no space is put before it."""
    anchor = tokenizer.encode("<|im_end|>x", add_special_tokens=False)
    ids = tokenizer.encode("<|im_end|>x" + text, add_special_tokens=False)
    assert ids[: len(anchor)] == anchor
    return ids[len(anchor) :]


def composed(text: str) -> str:
    """As first-generation Qwen sees a text."""
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("text", CHARACTERS)
def test_b01_a_character_of_several_tokens_comes_whole(tokenizer, text):
    prompt, ids = tokenizer.encode("Say:", add_special_tokens=False), continuation(tokenizer, text)
    assert len(ids) > 1
    deltas = stream(tokenizer, prompt, ids)
    assert "".join(deltas) == whole(tokenizer, prompt, ids)
    assert "".join(deltas) in (text, composed(text))
    assert "\ufffd" not in "".join(deltas).replace("\ufffd", "", text.count("\ufffd"))


@pytest.mark.parametrize("text", CHARACTERS[:5])
def test_b01_cut_in_the_middle_of_a_character(tokenizer, text):
    """Of what is incomplete one U+FFFD comes at the end, and nothing that was complete is lost.

    (A full decode does lose it where bytes are tokens: one bad byte spoils its whole run.)
    """
    prompt, ids = tokenizer.encode("Say:", add_special_tokens=False), continuation(tokenizer, "ok " + text)
    complete = ""
    for end in range(1, len(ids) + 1):
        so_far = whole(tokenizer, prompt, ids[:end])
        cut = "\ufffd" in so_far
        complete = complete if cut else so_far
        *deltas, last = stream(tokenizer, prompt, ids[:end])
        assert "".join(deltas) == complete
        assert last == ("\ufffd" if cut else "")
    assert complete in ("ok " + text, "ok " + composed(text))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("text", SPACES)
def test_b03_spaces_are_kept(tokenizer, text, prompt):
    before, ids = tokenizer.encode(prompt, add_special_tokens=False), continuation(tokenizer, text)
    assert "".join(stream(tokenizer, before, ids)) == whole(tokenizer, before, ids)
    if prompt:
        assert "".join(stream(tokenizer, before, ids)) == text


def test_b03_a_first_token_with_a_space_in_front(tokenizer):
    """The piece ▁the after "Hello" is " the", and after a chat's header as well."""
    [*_, the] = tokenizer.encode("Hello the", add_special_tokens=False)
    prompt = tokenizer.encode("Hello", add_special_tokens=False)
    assert stream(tokenizer, prompt, [the])[0] == " the"
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert "".join(stream(tokenizer, chat, [the])) == whole(tokenizer, chat, [the])


def test_a_prompt_cut_inside_a_character_is_no_context(of_bytes):
    half = of_bytes.encode("聪", add_special_tokens=False)
    assert len(half) == 3
    assert "".join(stream(of_bytes, half[:2], of_bytes.encode("ab"))) == "ab"
    # The rest of the character is none on its own; nothing is swallowed.
    assert "".join(stream(of_bytes, half[:2], [half[2], *of_bytes.encode("ab")])) == "\ufffdab"


def test_special_tokens_are_skipped_or_shown(tokenizer):
    ids = tokenizer.encode("<|im_start|>the<|im_end|> end", add_special_tokens=False)
    prompt = tokenizer.encode("Say:", add_special_tokens=False)
    hidden, shown = ("".join(stream(tokenizer, prompt, ids, skip)) for skip in (True, False))
    assert hidden == whole(tokenizer, prompt, ids)
    assert "<|im" not in hidden
    assert shown == whole(tokenizer, prompt, ids, skip=False)
    assert shown.count("<|im_end|>") == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["bytes", "qwen"])
def test_random_tokens_join_to_the_full_decode(name, seed, tmp_path):
    """Tokens that no text has: halves of characters, bytes that are never UTF-8, and between them text."""
    tokenizer = Tokenizer.load(SAVERS[name](tmp_path))
    assert tokenizer is not None
    rng = random.Random(seed)
    ids = [rng.randrange(3, 300) for _ in range(200)]
    deltas = stream(tokenizer, [], ids)
    full = whole(tokenizer, [], ids)
    # What is cut at the end is one character.
    assert "".join(deltas) == full.rstrip("\ufffd") + "\ufffd" * full.endswith("\ufffd")
    for delta in deltas:
        delta.encode()  # no surrogates: valid UTF-8


@pytest.mark.parametrize("character", ["é", "聪", "👍"])
@pytest.mark.parametrize("before", [0, 1, *range(MAX_HELD_TOKENS - 3, MAX_HELD_TOKENS + 4), 3 * MAX_HELD_TOKENS])
@pytest.mark.parametrize("name", ["bytes", "qwen"])
def test_a_character_after_invalid_bytes_comes_whole(name, before, character, tmp_path):
    tokenizer = Tokenizer.load(SAVERS[name](tmp_path))
    assert tokenizer is not None
    good = tokenizer.encode(character)
    assert len(good) == len(character.encode())
    ids = [good[-1]] * before + good
    assert "".join(stream(tokenizer, tokenizer.encode("Say:"), ids)) == "\ufffd" * before + character


def test_long_runs_of_invalid_bytes_come_out_and_cost_nothing_more(of_bytes, monkeypatch):
    continuation_byte = of_bytes.encode("聪", add_special_tokens=False)[1]
    windows = []

    def decode(ids, *, skip_special_tokens):
        windows.append(len(ids))
        return Tokenizer.decode(of_bytes, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(of_bytes, "decode", decode)
    ids = [continuation_byte] * 500 + of_bytes.encode("the end")
    deltas = stream(of_bytes, of_bytes.encode("Say:"), ids)
    assert "".join(deltas) == "\ufffd" * 500 + "the end"
    assert max(windows) <= CONTEXT_TOKENS + 2 * (MAX_HELD_TOKENS + 1)
    # Let go in time: a reader sees that something happens.
    silent = max(map(len, "".join("x" if d else "." for d in deltas[:500]).split("x")))
    assert silent <= MAX_HELD_TOKENS


def test_a19_an_id_without_a_token_gives_nothing(tokenizer):
    the = continuation(tokenizer, " the")
    assert "".join(stream(tokenizer, continuation(tokenizer, "x"), [100_000, *the, 99_999, *the])) == " the the"


def stop(words: list[str], chunks: list[str], include: bool = False) -> tuple[str, bool]:
    """The text that reaches the client, and whether a stop word was found."""
    stop_words = StopWords(words, include)
    out = ""
    for chunk in chunks:
        text, found = stop_words.push(chunk)
        out += text
        if found:
            return out, True
    return out + stop_words.release(), False


@pytest.mark.parametrize(
    ("words", "chunks", "expected"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "KL"], "ABC"),
        (["\n\n"], ["a", "\n", "\n", "b"], "a"),
        (["\n\n"], [".\n\nX"], "."),
        (["stop"], ["don't stop!", " now"], "don't "),
        (["。好"], ["你", "。", "好", "吗"], "你"),
        (["aab"], ["a", "a", "a", "b"], "a"),
        (["abab"], ["ababab"], ""),
        (["END", "ENDING"], ["the ENDING"], "the "),
        (["ENDING", "END"], ["the E", "ND", "ING"], "the "),
        (["xEND", "END"], ["the x", "END"], "the "),
        (["x"], ["", "", "x"], ""),
    ],
)
def test_b05_stop_words_across_token_borders(words, chunks, expected):
    assert stop(words, chunks) == (expected, True)


@pytest.mark.parametrize(
    ("words", "chunks"), [(["DEFGHIJ"], ["DEF", "G", "HI", "K"]), (["\n\n"], ["a\n", "b\n"]), ([], ["x"])]
)
def test_b05_what_only_began_like_a_stop_word_is_let_go(words, chunks):
    assert stop(words, chunks) == ("".join(chunks), False)


def test_b05_text_is_held_back_no_longer_than_needed():
    stop_words = StopWords(["DEFG", "\n\n"], include=False)
    assert [stop_words.push(t)[0] for t in ("ABC", "D", "E", "X", "\n", "y")] == ["ABC", "", "", "DEX", "", "\ny"]


def test_b05_include_stop():
    assert stop(["END"], ["the E", "NDING"], include=True) == ("the END", True)


def test_b05_a_thousand_stop_words():
    words = [f"stop word {i:04}" for i in range(1000)]
    start = time.monotonic()
    assert stop(words, [*"a long text about stop words " * 40, *"and stop word 0999 follows"])[0].endswith("words and ")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("seed", range(200))
def test_b05_the_result_does_not_depend_on_where_tokens_end(seed):
    """The word that ends first counts, and of those the longest; however the text is cut into pieces."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("ab", k=rng.randrange(2, 6))) for _ in range(rng.randrange(1, 4))]
    text = "".join(rng.choices("abc", k=20))
    ends = [(text.find(w) + len(w), text.find(w)) for w in words if w in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    for _ in range(5):
        cuts = sorted(rng.sample(range(1, 20), rng.randrange(8)))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 20], strict=True)]
        assert stop(words, chunks) == expected


def answer(
    tokenizer: Tokenizer, prompt: str, text: str, words: list[str], include=False, min_tokens=0
) -> tuple[str, bool]:
    """AnswerText over the tokens of a text."""
    before = tokenizer.encode(prompt, add_special_tokens=False)
    stream = AnswerText(Detokenizer(tokenizer, before, True), StopWords(words, include))
    out = ""
    for n, token in enumerate(continuation(tokenizer, text)):
        delta, stopped = stream.push(token, may_stop=n >= min_tokens)
        out += delta
        if stopped:
            assert stream.finish() == ""
            return out, True
    return out + stream.finish(), False


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("hello world. Stop here!", ["Stop"], "hello world. "),
        ("a\n\nb", ["\n\n"], "a"),
        ("the 聪明 fox", ["明"], "the 聪"),
        ("the 👍 fox", ["👍"], "the "),
        ("again    four", ["   "], "again"),
        ("the end", ["nd"], "the e"),
    ],
)
def test_b05_on_real_tokens(tokenizer, text, words, expected):
    assert answer(tokenizer, "Say:", text, words) == (expected, True)
    assert answer(tokenizer, "Say:", text, words, include=True) == (expected + words[0], True)


def test_b05_the_prompts_text_never_triggers(tokenizer):
    assert answer(tokenizer, "Stop", " the end", ["Stop", "p t"]) == (" the end", False)


def test_c12_before_the_minimum_stop_words_are_text(tokenizer):
    """A word that began before the minimum and ends after it is no stop word either."""
    count = len(continuation(tokenizer, "the end the end"))
    assert answer(tokenizer, "Say:", "the end the end", ["end"], min_tokens=count) == ("the end the end", False)
    first = len(continuation(tokenizer, "the end"))
    assert answer(tokenizer, "Say:", "the end the end!", ["end"], min_tokens=first) == ("the end the ", True)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_word_in_a_token_that_ends_in_half_a_character(include):
    """Found when the token comes, also if it is the last one; what stands before the half is not held back."""
    tokens = {0: b"Say:", 1: b" do", 2: b" Stop\xe8", 3: b"\x81\xaa!"}
    codec = ByteCodec(
        encode=lambda text: [], tokens=tokens, special={"<x>": 9}, hidden=frozenset(), bos=None, eos=9, names={},
        chat_template=None,
    )  # fmt: skip
    of_halves = Tokenizer(codec, None)
    stream = AnswerText(Detokenizer(of_halves, [0], True), StopWords(["Stop"], include))
    assert stream.push(1, may_stop=True) == (" do", False)
    assert stream.push(2, may_stop=True) == (" Stop" if include else " ", True)
    assert stream.finish() == ""
    detokenizer = Detokenizer(of_halves, [0], True)
    assert [*(detokenizer.push(i) for i in (1, 2, 3)), detokenizer.finish()] == [" do", " Stop", "聪!", ""]


def test_special_tokens_without_end_cost_nothing(of_bytes, monkeypatch):
    """As a chat model gives them under ignore_eos: they are skipped, and the window does not grow."""
    [end] = of_bytes.encode("<|im_end|>")
    windows = []

    def decode(ids, *, skip_special_tokens):
        windows.append(len(ids))
        return Tokenizer.decode(of_bytes, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(of_bytes, "decode", decode)
    ids = [*of_bytes.encode("the"), *[end] * 500, *of_bytes.encode(" end")]
    assert "".join(stream(of_bytes, of_bytes.encode("Say:"), ids)) == "the end"
    assert max(windows) <= CONTEXT_TOKENS + 10


def test_held_text_comes_with_finish(tokenizer):
    assert answer(tokenizer, "Say:", "the end", ["end of it"]) == ("the end", False)
