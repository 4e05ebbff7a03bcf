"""Right requests get the right answer, token for token."""

import concurrent.futures

import pytest
from support.hand_model import Inbox, continuation
from support.live_server import SESSION_LEN, SLOTS, TEXT_VOCAB, LiveServer, collect, failure, ids_request

from pallasite.serve.frontend import Frontend
from pallasite.serve.proto import pallasite_pb2 as pb
from pallasite.serve.types import GenerationConfig


def direct(frontend: Frontend, prompt, choice: int = 0, **config) -> tuple[list[int], str]:
    """The answer that the notebook API would get."""
    inboxes: dict[int, Inbox] = {}
    requests = frontend.requests(
        prompt, GenerationConfig(**config), lambda c, output: inboxes.setdefault(c, Inbox()).outputs.put(output)
    )
    for c in range(len(requests)):
        inboxes[c] = Inbox()
    for request in requests:
        frontend.engine.submit(request)
    result = inboxes[choice].result()
    return list(result.token_ids), result.text


def test_token_ids(live: LiveServer):
    text, ids, last = collect(live.stub.Generate(ids_request([1, 2, 3], max_new_tokens=40)))
    assert ids == continuation([1, 2, 3], 40, TEXT_VOCAB)
    assert text == live.frontend.tokenizer.decode(ids)
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    assert last.usage == pb.Usage(prompt_tokens=3, completion_tokens=40)


def test_many_at_once(live: LiveServer):
    prompts = [[i + 4, 2 * i + 5, *range(i)] for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda p: collect(live.stub.Generate(ids_request(p, max_new_tokens=60)))[1], prompts))
    assert answers == [continuation(p, 60, TEXT_VOCAB) for p in prompts]


@pytest.mark.parametrize("preprocess", [None, True, False])
def test_text(live: LiveServer, preprocess: bool | None):
    request = pb.GenerateRequest(text="be c", generation_config=pb.GenerationConfig(max_new_tokens=20))
    if preprocess is not None:
        request.do_preprocess = preprocess
    tokenizer = live.frontend.tokenizer
    if preprocess is False:
        prompt = tokenizer.encode("be c")
    else:
        prompt = tokenizer.encode("<user>be c<assistant>", add_special_tokens=False)
    _, ids, last = collect(live.stub.Generate(request))
    assert ids == continuation(prompt, 20, TEXT_VOCAB)
    assert last.usage.prompt_tokens == len(prompt)


def test_conversation(live: LiveServer):
    turns = [("system", "a b"), ("user", "c"), ("assistant", "d"), ("user", "<end>e")]
    messages = pb.Messages(messages=[pb.Message(role=r, content=c) for r, c in turns])
    request = pb.GenerateRequest(messages=messages, generation_config=pb.GenerationConfig(max_new_tokens=10))
    prompt = [{"role": r, "content": c} for r, c in turns]
    text, ids, _ = collect(live.stub.Generate(request))
    assert (ids, text) == direct(live.frontend, prompt, max_new_tokens=10)
    # What the user typed is no control token.
    tokens = live.stub.Tokenize(pb.TokenizeRequest(messages=messages)).token_ids
    assert list(tokens) == live.frontend.tokenizer.encode_chat(prompt)
    assert 0 not in tokens


def test_half_characters_never_leave(live: LiveServer):
    """Answers of this tokenizer are full of lone and incomplete bytes; protobuf strings can't hold half a character."""
    for first in range(4, 40):
        request = ids_request([first, 50, 51], max_new_tokens=50)
        text, ids, _ = collect(live.stub.Generate(request))
        assert ids == continuation([first, 50, 51], 50, TEXT_VOCAB)
        assert text == direct(live.frontend, [first, 50, 51], max_new_tokens=50)[1]


def test_choices(live: LiveServer):
    """n answers, told apart by their index, are those that the notebook API gives."""
    config = {"n": 3, "do_sample": True, "random_seed": 2**64 - 1, "temperature": 0.7, "max_new_tokens": 15}
    responses = list(live.stub.Generate(ids_request([5, 6], **config)))
    for choice in range(3):
        mine = [r for r in responses if r.index == choice]
        ids = [i for r in mine for i in r.token_ids]
        assert (ids, "".join(r.text for r in mine)) == direct(live.frontend, [5, 6], choice, **config)
        assert [bool(r.finish_reason) for r in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].usage.completion_tokens == 15
    assert {r.index for r in responses} == {0, 1, 2}


def test_zero_and_absent_differ(live: LiveServer):
    """temperature absent is 0.8, which samples; 0 is greedy."""
    greedy = continuation([9, 9], 30, TEXT_VOCAB)
    config = {"do_sample": True, "max_new_tokens": 30, "random_seed": 3}
    assert collect(live.stub.Generate(ids_request([9, 9], temperature=0, **config)))[1] == greedy
    assert collect(live.stub.Generate(ids_request([9, 9], **config)))[1] != greedy


def test_stop(live: LiveServer):
    ids = continuation([8, 7], 20, TEXT_VOCAB)
    at = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    _, got, last = collect(live.stub.Generate(ids_request([8, 7], max_new_tokens=20, stop_token_ids=[ids[at]])))
    assert got == ids[:at]
    assert last.finish_reason == pb.FINISH_REASON_STOP


def test_logprobs(live: LiveServer):
    responses = list(live.stub.Generate(ids_request([1, 2], max_new_tokens=6, logprobs=3)))
    found = [p for r in responses for p in r.logprobs]
    assert [p.token_id for p in found] == continuation([1, 2], 6, TEXT_VOCAB)
    for p in found:
        assert len(p.top) == 3
        assert p.top[0].token_id == p.token_id
        assert p.top[0].logprob == p.logprob
        assert p.top[1].logprob == pytest.approx(p.logprob - 1, abs=1e-4)
    plain = list(live.stub.Generate(ids_request([1, 2], max_new_tokens=6)))
    assert not any(r.logprobs for r in plain)


def test_ends_at_session_len(live: LiveServer):
    """D10: with room for one token there is one, and the reason is length; without room the prompt is refused."""
    prompt = [i % 40 for i in range(SESSION_LEN - 1)]
    _, ids, last = collect(live.stub.Generate(ids_request(prompt, max_new_tokens=50)))
    assert ids == continuation(prompt, 1, TEXT_VOCAB)
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    error = failure(live.stub.Generate(ids_request([*prompt, 1])))
    assert (
        error.details()
        == f"the prompt has {SESSION_LEN} tokens; with session_len {SESSION_LEN} at most {SESSION_LEN - 1} fit"
    )


def test_cached_tokens(live: LiveServer):
    prompt = [(3 * i + 1) % 60 for i in range(70)]
    assert collect(live.stub.Generate(ids_request(prompt, max_new_tokens=2)))[2].usage.cached_tokens in (0, 64)
    assert collect(live.stub.Generate(ids_request(prompt, max_new_tokens=2)))[2].usage.cached_tokens == 64


def test_request_id(live: LiveServer):
    def echoed(request_id: str, *metadata: tuple[str, str]) -> str:
        call = live.stub.Generate(ids_request([1], request_id, max_new_tokens=1), metadata=metadata)
        initial = dict(call.initial_metadata())
        list(call)
        return initial["x-request-id"]

    assert echoed("", ("x-request-id", "from metadata")) == "from metadata"
    assert echoed("from-request") == "from-request"
    assert echoed("from-request", ("x-request-id", "a trace")) == "a trace"
    assert len({echoed(""), echoed("")}) == 2
    _, call = live.stub.GetModelInfo.with_call(pb.GetModelInfoRequest(), metadata=(("x-request-id", "x"),))
    assert dict(call.initial_metadata())["x-request-id"] == "x"


def test_model_info(live: LiveServer):
    info = live.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.version
    info.version = ""
    assert info == pb.GetModelInfoResponse(
        name="hand",
        architecture="HandModel",
        session_len=SESSION_LEN,
        vocab_size=TEXT_VOCAB,
        has_tokenizer=True,
        max_batch_size=SLOTS,
    )


def test_tokenize_and_back(live: LiveServer):
    raw = live.stub.Tokenize(pb.TokenizeRequest(text="a é<end>", do_preprocess=False)).token_ids
    assert list(raw) == live.frontend.tokenizer.encode("a é<end>")
    assert live.stub.Detokenize(pb.DetokenizeRequest(token_ids=raw)).text == "a é"
    kept = live.stub.Detokenize(pb.DetokenizeRequest(token_ids=raw, skip_special_tokens=False))
    assert kept.text == "a é<end>"
    chat = live.stub.Tokenize(pb.TokenizeRequest(text="a é")).token_ids
    assert list(chat) == [1, *live.frontend.tokenizer.encode("a é"), 2]
