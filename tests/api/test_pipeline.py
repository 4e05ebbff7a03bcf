"""The notebook API on a small real checkpoint: what goes in, what comes out, what is refused."""

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
from support.small_checkpoint import WEIGHTS

import pallasite
from pallasite import EngineClosed, EngineConfig, GenerationConfig, Response, Session, TokenLogprob, pipeline

PROMPTS = ["hello", "The quick brown fox", "a"]
SHORT = GenerationConfig(max_new_tokens=12, ignore_eos=True)
LONG = GenerationConfig(max_new_tokens=60, ignore_eos=True)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


# What a prompt may be.


def test_a_text(pipe):
    answer = pipe("hello", SHORT)
    assert isinstance(answer, Response)
    assert len(answer.token_ids) == answer.generate_token_len == 12
    # Of a character that the limit cuts, one U+FFFD is left.
    assert answer.text.rstrip("\ufffd") == pipe.frontend.tokenizer.decode(answer.token_ids).rstrip("\ufffd")
    assert (answer.finish_reason, answer.index, answer.choice, answer.error) == ("length", 0, 0, None)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.input_token_len == len(pipe.frontend.tokenizer.encode(rendered))
    assert answer.logprobs is None


def test_lists_and_messages_are_the_same_prompts(pipe):
    alone = [pipe(text, SHORT) for text in PROMPTS]
    together = pipe(PROMPTS, SHORT)
    assert [r.index for r in together] == [0, 1, 2]
    conversations = pipe([user(text) for text in PROMPTS], SHORT)
    one_conversation = [pipe(user(text), SHORT) for text in PROMPTS]
    ids = [pipe.generate(pipe.frontend.token_ids(text), SHORT) for text in PROMPTS]
    for answers in (together, conversations, one_conversation, ids):
        assert [r.token_ids for r in answers] == [r.token_ids for r in alone]
        assert [r.text for r in answers] == [r.text for r in alone]
    assert len({r.text for r in alone}) == 3


def test_kinds_of_prompts_may_be_mixed(pipe):
    raw = pipe.frontend.tokenizer.encode("hello")
    mixed = pipe(["hello", user("hello"), raw, np.asarray(raw)], SHORT)
    assert mixed[0].token_ids == mixed[1].token_ids
    assert mixed[2].token_ids == mixed[3].token_ids != mixed[0].token_ids


def test_without_the_chat_template(pipe):
    raw = pipe("hello", SHORT, do_preprocess=False)
    assert raw.input_token_len == len(pipe.frontend.tokenizer.encode("hello"))
    assert raw.token_ids == pipe.generate(pipe.frontend.tokenizer.encode("hello"), SHORT).token_ids
    assert raw.token_ids != pipe("hello", SHORT).token_ids


def test_generate_takes_ids(pipe):
    one = pipe.generate([5, 6, 7], SHORT)
    assert isinstance(one, Response)
    assert one.input_token_len == 3
    several = pipe.generate([[5, 6, 7], [8], [5, 6, 7]], SHORT)
    assert several[0].token_ids == several[2].token_ids == one.token_ids
    assert pipe.generate(np.asarray([5, 6, 7]), SHORT).token_ids == one.token_ids


@pytest.mark.parametrize("nothing", ["__call__", "generate", "get_logits", "get_ppl"])
def test_no_prompts_give_no_answers(pipe, nothing):
    assert getattr(pipe, nothing)([]) == []


# Configs.


def test_a_config_for_each_prompt(pipe):
    configs = [dataclasses.replace(SHORT, max_new_tokens=n) for n in (3, 5, 1)]
    answers = pipe(PROMPTS, configs)
    assert [r.generate_token_len for r in answers] == [3, 5, 1]
    for whole, answer in zip(pipe(PROMPTS, SHORT), answers, strict=True):
        assert answer.token_ids == whole.token_ids[: answer.generate_token_len]


@pytest.mark.parametrize(
    ("configs", "problem"),
    [
        ([SHORT, SHORT], "gen_config holds 2 configs for 3 prompts"),
        ([], "gen_config holds 0 configs for 3 prompts"),
        ([SHORT, SHORT, None], "gen_config holds a NoneType; it must be a GenerationConfig"),
        ({"max_new_tokens": 3}, "gen_config is a dict; it must be a GenerationConfig, or a list of them"),
        (3, "gen_config is a int; it must be a GenerationConfig, or a list of them"),
    ],
)
def test_wrong_configs_raise(pipe, configs, problem):
    with pytest.raises(ValueError, match=problem):
        pipe(PROMPTS, configs)
    with pytest.raises(ValueError, match=problem):
        list(pipe.stream_infer(PROMPTS, configs))


def test_several_answers_stand_side_by_side(pipe):
    sampled = dataclasses.replace(SHORT, do_sample=True, temperature=1.5, random_seed=5)
    answers = pipe(PROMPTS[:2], [dataclasses.replace(sampled, n=3), dataclasses.replace(sampled, n=2)])
    assert [(r.index, r.choice) for r in answers] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert len({tuple(r.token_ids) for r in answers}) == 5
    single = pipe(PROMPTS[0], dataclasses.replace(sampled, n=3))
    assert [r.token_ids for r in single] == [r.token_ids for r in answers[:3]]


# What is refused.


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "the prompt is empty"),
        ([{"role": "user"}], r"message 0 \(user\) has content None; it must be a text"),
        ([{"content": "hello"}], "message 0 has role None"),
        (np.asarray([], int), "at least one token id"),
        ([5, 320], "token id 320 lies outside the vocabulary; ids go from 0 to 319"),
        ([5, -1], "token id -1 lies outside the vocabulary"),
        ([5, 2**40], f"token id {2**40} lies outside the vocabulary"),
        ([5, 6.5], "token ids must be integers"),
        ([True], "token ids must be integers, got bool"),
        ([7] * 256, "the prompt has 256 tokens; with session_len 256 at most 255 fit"),
        ("hello " * 200, r"the prompt has \d+ tokens; with session_len 256 at most 255 fit"),
    ],
)
def test_a_wrong_prompt(pipe, prompt, problem):
    """Alone it raises; in a list only its own Response says so, and its neighbours are answered as ever."""
    with pytest.raises(ValueError, match=problem):
        pipe(prompt, SHORT)
    with pytest.raises(ValueError, match=problem):
        list(pipe.stream_infer(prompt, SHORT))
    before, wrong, after = pipe(["hello", prompt, "a"], SHORT)
    assert (wrong.finish_reason, wrong.index, wrong.text, wrong.token_ids) == ("error", 1, "", [])
    with pytest.raises(ValueError, match=problem):
        raise ValueError(wrong.error)
    assert [before.token_ids, after.token_ids] == [pipe("hello", SHORT).token_ids, pipe("a", SHORT).token_ids]
    assert before.error is None
    pieces = [p for p in pipe.stream_infer(["hello", prompt, "a"], SHORT) if p.index == 1]
    assert [(p.finish_reason, p.error) for p in pieces] == [("error", wrong.error)]


@pytest.mark.parametrize("prompts", [None, 5, b"hello", {"role": "user", "content": "hello"}])
def test_what_is_no_prompt(pipe, prompts):
    with pytest.raises(ValueError, match="a list of messages"):
        pipe(prompts)


def test_b11_empty_prompts(pipe):
    """Case B11: an error of its own or an answer, never a dead engine."""
    assert [r.finish_reason for r in pipe([""], SHORT)] == ["error"]
    assert [r.finish_reason for r in pipe([[]], SHORT)] == ["error"]
    assert [r.finish_reason for r in pipe(["ok", "", "ok"], SHORT)] == ["length", "error", "length"]
    assert pipe("   ", SHORT).finish_reason == "length"
    assert pipe(user(""), SHORT).finish_reason == "length"  # the template makes tokens of it


@pytest.mark.parametrize("ids", ["hello", ["hello"], [[5], "hello"], user("hello"), [user("hello")]])
def test_generate_refuses_what_are_no_ids(pipe, ids):
    with pytest.raises(ValueError, match="it must be a list of token ids"):
        pipe.generate(ids, SHORT)


def test_stop_ids_outside_the_vocabulary(pipe):
    with pytest.raises(ValueError, match="stop_token_ids holds 320; token ids go from 0 to 319"):
        pipe("hello", dataclasses.replace(SHORT, stop_token_ids=[320]))
    [wrong, right] = pipe(["hello"] * 2, [dataclasses.replace(SHORT, stop_token_ids=[320]), SHORT])
    assert (wrong.finish_reason, right.finish_reason) == ("error", "length")


# Streams.


def test_pieces_join_to_the_answer(pipe):
    configs = [LONG, dataclasses.replace(LONG, n=2, do_sample=True, random_seed=1), LONG]
    answers = {(r.index, r.choice): r for r in pipe(PROMPTS, configs)}
    pieces: dict[tuple[int, int], list[Response]] = {}
    for piece in pipe.stream_infer(PROMPTS, configs):
        pieces.setdefault((piece.index, piece.choice), []).append(piece)
    assert sorted(pieces) == sorted(answers) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    for key, parts in pieces.items():
        assert len(parts) > 3
        assert "".join(p.text for p in parts) == answers[key].text
        assert [i for p in parts for i in p.token_ids] == answers[key].token_ids
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["length"]
        # Lengths are totals, at every piece.
        totals = np.cumsum([len(p.token_ids) for p in parts]).tolist()
        assert [p.generate_token_len for p in parts] == totals
        assert {p.input_token_len for p in parts} == {answers[key].input_token_len}


@pytest.mark.parametrize("how", ["close", "forget", "raise"])
def test_an_abandoned_stream_is_cancelled(pipe, how):
    """Nobody reads on: the work stops, and the fixture sees all pages free."""
    many = dataclasses.replace(LONG, max_new_tokens=200)
    before = pipe.frontend.engine.stats().generated_tokens
    stream = pipe.stream_infer(["hello"] * 16, many)
    next(stream)
    if how == "close":
        stream.close()
    elif how == "forget":
        del stream
    else:
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
    assert pipe("a", SHORT).finish_reason == "length"
    assert pipe.frontend.engine.stats().generated_tokens - before < 16 * 200 / 2


def test_callers_in_several_threads(pipe):
    expected = [pipe(text, LONG).token_ids for text in PROMPTS]
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = pipe(PROMPTS[i % 3], LONG).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(9)] == expected * 3


# Conversations.


def test_chat_over_turns(pipe):
    first = pipe.chat("The quick brown fox jumps over the lazy dog.", gen_config=SHORT)
    assert isinstance(first, Session)
    assert [m["role"] for m in first.messages] == ["user", "assistant"]
    assert first.messages[1]["content"] == first.response.text
    assert first.response.token_ids == pipe("The quick brown fox jumps over the lazy dog.", SHORT).token_ids
    second = pipe.chat("And then?", first, SHORT)
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user", "assistant"]
    # The whole history went in, and its beginning came from the prefix cache.
    assert second.response.token_ids == pipe(second.messages[:3], SHORT).token_ids
    assert 16 <= second.response.cached_tokens < second.response.input_token_len


def test_chat_takes_messages_too(pipe):
    system = {"role": "system", "content": "be brief"}
    session = pipe.chat([system, *user("hello")], gen_config=SHORT)
    assert session.response.token_ids == pipe([system, *user("hello")], SHORT).token_ids


@pytest.mark.parametrize("turn", ["", "x" * 300, 5, [], [1, 2, 3], [{"role": "user", "content": None}]])
def test_a_turn_that_fails_leaves_the_session(pipe, turn):
    session = pipe.chat("hello", gen_config=SHORT)
    messages, response = list(session.messages), session.response
    if turn == "":
        # Nothing said is a message too; the template makes tokens of it.
        assert len(pipe.chat(turn, session, SHORT).messages) == 4
        return
    with pytest.raises(ValueError, match=r"a turn is a text|the prompt has \d+ tokens|message 2 \(user\) has content"):
        pipe.chat(turn, session, SHORT)
    assert (session.messages, session.response) == (messages, response)
    assert len(pipe.chat("a", session, SHORT).messages) == 4


def test_what_is_no_session_or_no_config(pipe, checkpoint):
    with pytest.raises(ValueError, match="session is a list; it must be what chat returned, or None"):
        pipe.chat("hello", [])
    with pytest.raises(ValueError, match="backend_config is a dict; it must be an EngineConfig"):
        pipeline(checkpoint, {"tp": 1})


def test_a_turn_has_one_answer(pipe):
    with pytest.raises(ValueError, match="n is 2; a conversation goes on from one answer, so it must be 1"):
        pipe.chat("hello", gen_config=dataclasses.replace(SHORT, n=2))


# Evaluation.


def test_logits(pipe):
    prompts = [[5], [9, 8, 7, 6], list(range(100, 250))]
    logits = pipe.get_logits(prompts)
    assert [(x.shape, x.dtype) for x in logits] == [((len(p), 320), np.float32) for p in prompts]
    for prompt, scores in zip(prompts, logits, strict=True):
        assert np.array_equal(pipe.get_logits(prompt), scores)
        assert pipe.generate(prompt, dataclasses.replace(SHORT, max_new_tokens=1)).token_ids == [scores[-1].argmax()]
    # A prompt's logits are those of its beginning, however it is cut.
    assert np.abs(pipe.get_logits(prompts[2][:40]) - logits[2][:40]).max() < 1e-4


def test_perplexity_is_the_mean_over_the_logits(pipe):
    prompts = [[5, 6], list(range(100, 250))]
    found = pipe.get_ppl(prompts)
    for prompt, ppl, logits in zip(prompts, found, pipe.get_logits(prompts), strict=True):
        wide = logits[:-1].astype(np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
        assert ppl == pytest.approx(-logprobs[np.arange(len(prompt) - 1), prompt[1:]].mean(), rel=1e-5)
        assert pipe.get_ppl(prompt) == ppl


def test_scores_up_to_the_whole_session(pipe):
    """A prompt that is only scored may fill session_len: no token has to fit after it."""
    ids = [7] * 256
    assert pipe.get_logits(ids).shape == (256, 320)
    assert np.isfinite(pipe.get_ppl(ids))
    with pytest.raises(ValueError, match="the prompt has 257 tokens; with session_len 256 at most 256 fit"):
        pipe.get_logits([*ids, 7])


@pytest.mark.parametrize(
    ("call", "ids", "problem"),
    [
        ("get_ppl", [5], "perplexity needs at least 2 token ids, got 1"),
        ("get_ppl", [[5, 6], [7]], "perplexity needs at least 2 token ids, got 1"),
        ("get_ppl", [[5, 6], [7, 320]], "token id 320 lies outside the vocabulary"),
        ("get_logits", [[5, 6], [-1]], "token id -1 lies outside the vocabulary"),
        ("get_logits", "hello", "it must be a list of token ids"),
        ("get_ppl", [[5, 6], 7], "not int"),
        ("get_ppl", [0.5, 1.5], "not float"),
        ("get_ppl", [[[5, 6], [7]]], "a prompt must be a list of token ids, not of lists"),
        ("get_ppl", np.array(7), r"a list of at least one token id, got shape \(\)"),
    ],
)
def test_wrong_ids_are_not_scored(pipe, call, ids, problem):
    with pytest.raises(ValueError, match=problem):
        getattr(pipe, call)(ids)


# What a config does, through the whole pipeline. The single settings are tested in tests/serve.


def ascii_run(pipe, answer: Response) -> tuple[int, str]:
    """(token, text) where three tokens of an answer, not its first, are plain text and occur for the first time."""
    decode = pipe.frontend.tokenizer.decode
    for i in range(2, len(answer.token_ids) - 3):
        before, run = decode(answer.token_ids[:i]), decode(answer.token_ids[i : i + 3])
        if run.isascii() and len(set(run)) > 1 and answer.text.find(run) == len(before):
            return i, run
    raise AssertionError("no such run; choose another prompt")


@pytest.mark.parametrize("include", [False, True])
def test_stop_words_span_tokens(pipe, include):
    whole = pipe("The quick brown fox", LONG)
    at, run = ascii_run(pipe, whole)
    stop = run[1:-1] if len(run) > 3 else run
    config = dataclasses.replace(LONG, stop_words=["never said", stop], include_stop_str_in_output=include)
    answer = pipe("The quick brown fox", config)
    end = whole.text.find(stop) + (len(stop) if include else 0)
    assert (answer.text, answer.finish_reason) == (whole.text[:end], "stop")
    assert at < answer.generate_token_len < whole.generate_token_len
    streamed = list(pipe.stream_infer("The quick brown fox", config))
    assert "".join(p.text for p in streamed) == answer.text
    assert streamed[-1].finish_reason == "stop"


def test_bad_words_are_not_said(pipe):
    whole = pipe("hello", LONG)
    decode = pipe.frontend.tokenizer.decode
    word = next(t for t in map(decode, ([i] for i in whole.token_ids)) if t.isascii() and t.isalpha() and len(t) > 1)
    banned = {ids[0] for ids in pipe.frontend.tokenizer.encode_words(word) if len(ids) == 1}
    assert banned & set(whole.token_ids)
    answer = pipe("hello", dataclasses.replace(LONG, bad_words=[word]))
    assert not banned & set(answer.token_ids)
    with pytest.raises(ValueError, match=r"bad_words holds 'zzq', which is 3 tokens; only single tokens"):
        pipe("hello", dataclasses.replace(LONG, bad_words=["zzq"]))


def test_end_of_sequence_and_stop_ids(pipe):
    """Neither is part of the answer. After token 100 this model says 13 others and then 2, its end of sequence."""
    assert pipe.frontend.eos_ids == (2,)
    whole = pipe.generate([100], LONG)
    assert whole.token_ids.index(2) == 13
    ended = pipe.generate([100], GenerationConfig(max_new_tokens=60))
    assert (ended.finish_reason, ended.token_ids) == ("stop", whole.token_ids[:13])
    stop = whole.token_ids[13 + 5]
    for ids in ([stop], np.array([stop]), np.array([stop, stop])):
        stopped = pipe.generate([100], dataclasses.replace(LONG, stop_token_ids=ids))
        assert (stopped.finish_reason, stopped.token_ids) == ("stop", whole.token_ids[: whole.token_ids.index(stop)])
    later = pipe.generate([100], GenerationConfig(max_new_tokens=60, min_new_tokens=20))
    assert later.generate_token_len >= 20
    assert later.token_ids[:13] == whole.token_ids[:13]
    assert 2 not in later.token_ids


def test_logprobs(pipe):
    config = dataclasses.replace(SHORT, logprobs=4)
    answer = pipe("hello", config)
    assert answer.token_ids == pipe("hello", SHORT).token_ids
    assert [type(p) for p in answer.logprobs] == [TokenLogprob] * 12
    prompt = pipe.frontend.token_ids("hello")
    logits = pipe.get_logits(prompt + answer.token_ids)[len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for token, row, logprob in zip(answer.token_ids, expected, answer.logprobs, strict=True):
        assert logprob.token_id == token == logprob.top[0][0]
        assert logprob.logprob == pytest.approx(row[token], abs=1e-4)
        assert [i for i, _ in logprob.top] == np.argsort(-row)[:4].tolist()
        assert [p for _, p in logprob.top] == pytest.approx(np.sort(row)[::-1][:4].tolist(), abs=1e-4)


def test_responses_are_json(pipe):
    """Case C10: whatever was filtered, what is reported is a finite number."""
    hard = GenerationConfig(
        max_new_tokens=8, do_sample=True, temperature=0.01, top_p=0.3, top_k=1, logprobs=5, ignore_eos=True
    )
    for config in (hard, dataclasses.replace(SHORT, logprobs=0)):
        answer = pipe("hello", config)
        again = json.loads(json.dumps(dataclasses.asdict(answer), allow_nan=False))
        assert again["token_ids"] == answer.token_ids
        assert [len(p["top"]) for p in again["logprobs"]] == [config.logprobs] * answer.generate_token_len


def test_repr_is_short(pipe):
    answer = pipe("The quick brown fox", dataclasses.replace(LONG, max_new_tokens=200, logprobs=5))
    assert len(repr(answer)) < 250
    assert "\n" not in repr(answer)
    assert repr(answer).startswith("Response(index=0, text=")
    assert "tokens=29+200" in repr(answer)
    assert "error='why'" in repr(Response(finish_reason="error", error="why"))


# A checkpoint without a tokenizer.


def test_without_a_tokenizer(open_small):
    with open_small(WEIGHTS) as pipe:
        answer = pipe.generate([5, 6, 7], SHORT)
        assert (answer.generate_token_len, answer.text) == (12, "")
        assert pipe([[5, 6, 7], [8]], SHORT)[0].token_ids == answer.token_ids
        assert [i for p in pipe.stream_infer([5, 6, 7], SHORT) for i in p.token_ids] == answer.token_ids
        needs = "needs a tokenizer, and the checkpoint has none; send token ids"
        for call in (
            lambda: pipe("hello"),
            lambda: pipe(user("hello")),
            lambda: pipe.chat("hello"),
            lambda: pipe.generate([5], GenerationConfig(stop_words=["x"])),
            lambda: pipe.generate([5], GenerationConfig(bad_words=["x"])),
        ):
            with pytest.raises(ValueError, match=needs):
                call()
        [right, wrong] = pipe([[5, 6, 7], "hello"], SHORT)
        assert right.token_ids == answer.token_ids
        assert needs in wrong.error


# Opening and closing.


def test_close(open_small):
    pipe = open_small()
    answers: list[Response] = []
    many = dataclasses.replace(LONG, max_new_tokens=200)
    waiting = threading.Thread(target=lambda: answers.extend(pipe(["hello"] * 16, many)), daemon=True)
    waiting.start()
    deadline = time.monotonic() + 20
    while (stats := pipe.frontend.engine.stats()).running + stats.waiting < 16:  # all are submitted
        assert time.monotonic() < deadline
        time.sleep(0)
    pipe.close()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    assert len(answers) == 16
    assert {(r.finish_reason, r.error) for r in answers} == {("error", "the engine was closed")}
    pipe.close()
    for use in (
        lambda: pipe("hello"),
        lambda: pipe(["hello", "a"]),
        lambda: pipe.generate([5]),
        lambda: next(pipe.stream_infer("hello")),
        lambda: pipe.chat("hello"),
        lambda: pipe.get_logits([5]),
        lambda: pipe.get_ppl([5, 6]),
    ):
        with pytest.raises(EngineClosed, match="the engine is closed"):
            use()


def test_an_exception_closes(open_small):
    with pytest.raises(ZeroDivisionError), open_small() as pipe:
        _ = 1 / 0
    assert pipe.frontend.engine.closed
    with pytest.raises(EngineClosed):
        pipe("hello")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"tp": 1000}, r"tp is 1000; it must lie in 1\.\.8, the cpu devices here"),
        ({"session_len": 512}, "session_len is 512; the model's positions end at 256"),
        ({"session_len": 256, "cache_max_entry_count": 16}, "session_len is 256, but the KV pool holds 240 tokens"),
        ({"model_format": "gguf"}, "model_format is 'gguf', but"),
        ({"model_format": "pallasite"}, "model_format is 'pallasite', but"),
        ({"device": "gpu"}, "device is 'gpu', but JAX finds none"),
    ],
)
def test_configs_that_a_model_can_not_have(open_small, config, problem):
    with pytest.raises(ValueError, match=problem):
        open_small(**config)


def test_a_pool_smaller_than_the_models_own_session(open_small, caplog):
    """Nobody asked for 256: the session is cut to what the pool holds, and that is said."""
    with open_small(cache_max_entry_count=9) as pipe:
        assert pipe.frontend.session_len == 8 * 16
        assert "session_len is cut from 256 to the 128 tokens that the KV pool holds" in caplog.text
        answer = pipe("hello", LONG)
        assert (answer.finish_reason, answer.generate_token_len) == ("length", 60)
        answer = pipe("hello", dataclasses.replace(LONG, max_new_tokens=1000))
        assert answer.input_token_len + answer.generate_token_len == 128


def test_the_format_that_it_has(open_small):
    with pytest.raises(ValueError, match="session_len is 512"):  # it got past the check of the format
        open_small(model_format="hf", session_len=512)


@pytest.mark.parametrize("path", ["nowhere", ""])
def test_paths_without_a_model(open_small, tmp_path, path):
    with pytest.raises((ValueError, OSError), match=r"no such file or folder|is an empty folder"):
        open_small(tmp_path / path)


def test_names():
    assert pallasite.TurbomindEngineConfig is EngineConfig
    assert set(pallasite.__all__) <= set(dir(pallasite))
    for name in pallasite.__all__:
        assert getattr(pallasite, name) is not None
    with pytest.raises(AttributeError, match="module 'pallasite' has no attribute 'nothing'"):
        _ = pallasite.nothing
