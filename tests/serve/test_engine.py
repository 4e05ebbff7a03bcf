"""The engine on the hand model: exact tokens whatever the route through scheduler, pages and steps."""

import contextlib
import gc
import queue
import random
import threading
import time
import weakref

import pytest
from support.hand_model import VOCAB, Inbox, ask, continuation, hand_engine, hand_model, settle

from pallasite.serve.types import EngineClosed, GenerationConfig, QueueFull, Request


def prompts(count: int, longest: int = 150, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def check(engine, some: list[list[int]], count: int) -> None:
    """All at once; each answer equals the one by hand."""
    inboxes = [ask(engine, prompt, max_new_tokens=count) for prompt in some]
    for prompt, inbox in zip(some, inboxes, strict=True):
        result = inbox.result()
        assert result.finish_reason == "length"
        assert list(result.token_ids) == continuation(prompt, min(count, engine.sizes.session_len - len(prompt)))


@pytest.fixture(scope="module")
def engine():
    engine = hand_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tight():
    """16 pages of 16 tokens for everybody: hardly more than one long sequence."""
    engine = hand_engine(cache_max_entry_count=17)
    yield engine
    engine.close()


def test_alone_and_in_a_batch(engine):
    some = prompts(24)
    for prompt in some[:3]:
        check(engine, [prompt], 20)
    check(engine, some, 20)
    settle(engine)
    assert engine.stats().compilations == 0
    assert engine.stats().pages_free == engine.stats().pages_total


def test_without_prefix_cache_and_with_whole_prefill():
    plain = hand_engine(enable_prefix_caching=False, max_prefill_token_num=256)
    check(plain, prompts(12), 20)
    [result] = [ask(plain, prompts(1, 150)[0] * 1, max_new_tokens=2).result() for _ in range(1)]
    assert result.cached_tokens == 0
    plain.close()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_a_prompt_that_is_cached_whole(engine, length):
    prompt = [(length * 7 + i) % VOCAB for i in range(length)]
    first = ask(engine, prompt, max_new_tokens=8).result()
    again = [ask(engine, prompt, max_new_tokens=8) for _ in range(2)]
    for result in (first, *(inbox.result() for inbox in again)):
        assert list(result.token_ids) == continuation(prompt, 8)
    # At least the last token is always run: its logits are needed.
    assert again[0].result().cached_tokens == (length - 1) // 16 * 16


def test_shared_prefixes_are_invisible(engine):
    start = prompts(1, seed=5)[0] + [3] * 100
    some = [start[:100] + tail for tail in prompts(20, 30, seed=6)]
    check(engine, some, 10)
    random.Random(1).shuffle(some)
    check(engine, some, 10)


def test_generated_pages_are_found_again(engine):
    prompt = [9, 8, 7]
    answer = continuation(prompt, 40)
    ask(engine, prompt, max_new_tokens=40).result()
    following = prompt + answer + [1]
    result = ask(engine, following, max_new_tokens=5).result()
    assert result.cached_tokens == 32
    assert list(result.token_ids) == continuation(following, 5)


def test_preemption_changes_nothing(tight):
    check(tight, prompts(8, 60, seed=2), 100)
    assert tight.stats().preemptions > 0
    assert tight.stats().pages_free == tight.stats().pages_total == 16


def test_preempted_streams_repeat_nothing(tight):
    before = tight.stats().preemptions
    some = prompts(6, 20, seed=3)
    inboxes = [ask(tight, prompt, max_new_tokens=150) for prompt in some]
    for prompt, inbox in zip(some, inboxes, strict=True):
        result = inbox.result()
        assert list(result.token_ids) == continuation(prompt, 150)
        assert sum(o.finish_reason is not None for o in inbox.seen) == 1
    assert tight.stats().preemptions > before


def test_sampling_with_a_seed_ignores_neighbours_and_preemption(engine, tight):
    settings = {"do_sample": True, "temperature": 30.0, "top_k": 0, "max_new_tokens": 60}
    some = prompts(6, 40, seed=4)
    alone = [ask(engine, p, seed=i, **settings).result().token_ids for i, p in enumerate(some)]
    assert len(set(alone)) == len(alone)
    for other in (engine, tight):
        together = [ask(other, p, seed=i, **settings) for i, p in enumerate(some)]
        assert [inbox.result().token_ids for inbox in together] == alone


def test_settings_do_not_leak_between_slots(engine):
    """Twelve requests with settings of their own, lengths such that slots turn over: each as if it were alone."""
    rng = random.Random(8)
    cases = []
    for i, prompt in enumerate(prompts(12, 40, seed=9)):
        settings = {
            "do_sample": i % 3 != 0,
            "temperature": rng.choice([5.0, 20.0]),
            "top_k": rng.choice([0, 1, 5, 40]),
            "top_p": rng.choice([1.0, 0.9]),
            "repetition_penalty": rng.choice([1.0, 1.3, 3.0]),
            "frequency_penalty": rng.choice([0.0, 2.0]),
            "logprobs": rng.choice([None, 0, 3]),
            "max_new_tokens": rng.randrange(3, 41),
        }
        cases.append((prompt, i, settings))
    alone = [ask(engine, p, seed=i, **s).result() for p, i, s in cases]
    together = [ask(engine, p, seed=i, **s) for p, i, s in cases]
    for (_, _, settings), one, inbox in zip(cases, alone, together, strict=True):
        other = inbox.result()
        assert other.token_ids == one.token_ids
        assert len(other.logprobs) == (0 if settings["logprobs"] is None else len(other.token_ids))


def test_penalty_counts_survive_preemption(engine, tight):
    settings = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "max_new_tokens": 120}
    some = prompts(5, 60, seed=10)
    roomy = [ask(engine, p, **settings).result().token_ids for p in some]
    inboxes = [ask(tight, p, **settings) for p in some]
    assert [inbox.result().token_ids for inbox in inboxes] == roomy
    assert list(roomy[0]) != continuation(some[0], 120)  # the penalties do something


@pytest.mark.parametrize(("length", "asked", "given"), [(200, 56, 56), (200, 57, 56), (255, 5, 1), (255, 1, 1)])
def test_session_len_limits_the_answer(engine, length, asked, given):
    prompt = [(i * 5) % VOCAB for i in range(length)]
    result = ask(engine, prompt, max_new_tokens=asked).result()
    assert result.finish_reason == "length"
    assert list(result.token_ids) == continuation(prompt, given)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([1] * 256, "256 tokens; with session_len 256 at most 255 fit"),
        ([], "at least one token id"),
        ([1, VOCAB], f"token id {VOCAB} lies outside the vocabulary; ids go from 0 to {VOCAB - 1}"),
        ([-1], "token id -1"),
        ([2**31], "token id 2147483648"),
        ([1.5], "must be integers"),
    ],
)
def test_bad_prompts_are_refused_and_hurt_nobody(engine, prompt, why):
    good = ask(engine, [1, 2, 3], max_new_tokens=50)
    with pytest.raises(ValueError, match=why):
        ask(engine, prompt)
    assert list(good.result().token_ids) == continuation([1, 2, 3], 50)


def test_bad_stop_ids_are_refused(engine):
    with pytest.raises(ValueError, match=r"stop_token_ids holds 64; token ids go from 0 to 63"):
        ask(engine, [1], stop_ids=(64,))


def test_stop_ids_and_minimum(engine):
    prompt = [4, 4]
    answer = continuation(prompt, 60)
    stop = answer[7]
    first = answer.index(stop)
    result = ask(engine, prompt, stop_ids=(stop,), max_new_tokens=60).result()
    assert result.finish_reason == "stop"
    assert list(result.token_ids) == answer[:first]
    # Before the minimum the stop id can't be sampled at all; the answer goes another way, and is longer.
    longer = ask(engine, prompt, stop_ids=(stop,), max_new_tokens=60, min_new_tokens=20).result()
    assert len(longer.token_ids) >= 20
    assert stop not in longer.token_ids


def test_a_finished_sequence_rides_no_step_that_is_seen(engine):
    """A sequence that stops while launches with it are in flight: nothing of them comes out, and its pages serve others
    at once."""
    prompt = [11, 12]
    answer = continuation(prompt, 30)
    for _ in range(5):
        inboxes = [ask(engine, prompt, stop_ids=(answer[3],), max_new_tokens=100) for _ in range(4)]
        for inbox in inboxes:
            assert list(inbox.result().token_ids) == answer[: answer.index(answer[3])]
        check(engine, prompts(4, 50, seed=12), 20)
    settle(engine)
    assert engine.stats().pages_free == engine.stats().pages_total


def test_cancel_frees_pages(engine):
    settle(engine)
    inbox = Inbox("cancelled")

    def cancel_at_once(output):  # on the engine's thread: it can't be done before
        inbox.outputs.put(output)
        engine.cancel("cancelled")

    engine.submit(Request("cancelled", [1] * 100, GenerationConfig(max_new_tokens=150), cancel_at_once))
    result = inbox.result()
    assert result.finish_reason == "abort"
    assert list(result.token_ids) == continuation([1] * 100, 150)[: len(result.token_ids)]
    settle(engine)
    assert engine.stats().pages_free == engine.stats().pages_total


def test_five_hundred_mixed_requests_with_random_cancels(tight):
    """The pool is whole afterwards, and a normal request gets the right answer."""
    rng = random.Random(13)
    inboxes = []
    for i in range(500):
        settings = {"do_sample": i % 2 == 0, "temperature": 10.0, "max_new_tokens": rng.randrange(1, 60)}
        inboxes.append(ask(tight, [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 120))], seed=i, **settings))
        if rng.random() < 0.5:
            tight.cancel(rng.choice(inboxes).request_id)
        if rng.random() < 0.1:
            time.sleep(0.01)
    reasons = {inbox.result().finish_reason for inbox in inboxes}
    assert reasons == {"length", "abort"}
    settle(tight)
    stats = tight.stats()
    assert stats.pages_free == stats.pages_total
    assert stats.compilations == 0
    check(tight, [[1, 2, 3]], 20)


def test_a_long_prompt_does_not_stop_the_others():
    """While a prompt of many chunks is prefilled, a stream goes on and a short newcomer gets its first token."""
    engine = hand_engine(session_len=512, max_prefill_token_num=64, enable_prefix_caching=False)
    times: dict[str, list[int]] = {"stream": [], "long": [], "short": []}
    step = iter(range(10**9))

    def watch(name):
        return lambda output: times[name].append(next(step))

    engine.submit(Request("stream", [1], GenerationConfig(max_new_tokens=200), watch("stream")))
    engine.submit(Request("long", [2] * 480, GenerationConfig(max_new_tokens=2), watch("long")))
    engine.submit(Request("short", [3] * 8, GenerationConfig(max_new_tokens=2), watch("short")))
    settle(engine)
    engine.close()
    assert times["short"][0] < times["long"][0]
    # The long prompt takes 8 steps of 64 tokens at least; the stream was heard in between, again and again.
    assert sum(t < times["long"][0] for t in times["stream"]) >= 6


def test_a_long_prompt_ends_under_a_flow_of_short_ones(engine):
    long = [(i * 3) % VOCAB for i in range(250)]
    inbox = ask(engine, long, max_new_tokens=3)
    flow = [ask(engine, prompt, max_new_tokens=5) for prompt in prompts(40, 60, seed=14)]
    assert list(inbox.result().token_ids) == continuation(long, 3)
    for other in flow:
        other.result()


def test_full_queue_refuses_and_waits():
    engine = hand_engine(max_batch_size=1, max_queue_size=2)
    inboxes = [ask(engine, [1] * 10, max_new_tokens=200) for _ in range(2)]
    with pytest.raises(QueueFull, match="the limit of max_queue_size"):
        inboxes += [ask(engine, [1] * 10, max_new_tokens=200) for _ in range(200)]
    for inbox in inboxes:
        assert inbox.result().finish_reason == "length"
    engine.close()


def test_who_waits_for_a_place_in_the_queue_gets_it():
    """Room is made when somebody is admitted: nobody else may come along to tell those who wait."""
    engine = hand_engine(max_batch_size=2, max_queue_size=3)
    outputs: queue.Queue = queue.Queue()
    longest = 0

    def submit():
        nonlocal longest
        for i in range(100):
            engine.submit(Request(f"r{i}", [i % VOCAB], GenerationConfig(max_new_tokens=3), outputs.put), wait=True)
            longest = max(longest, engine.stats().waiting)

    caller = threading.Thread(target=submit, daemon=True)
    caller.start()
    finished = 0
    while finished < 100:
        finished += outputs.get(timeout=20).finish_reason == "length"
    caller.join(timeout=10)
    assert longest <= 3
    engine.close()


def test_logits_that_are_not_finite_end_only_their_request():
    engine = hand_engine(hand_model(poison=63))
    good = [ask(engine, [1, 2, 3], max_new_tokens=60) for _ in range(3)]
    bad = ask(engine, [5, 63], max_new_tokens=10).result()
    assert bad.finish_reason == "error"
    assert "not finite" in bad.error
    assert bad.token_ids == ()
    right = continuation([1, 2, 3], 60)
    stop = right.index(63) + 1 if 63 in right else len(right)
    for inbox in good:
        assert list(inbox.result().token_ids)[:stop] == right[:stop]
    settle(engine)
    assert engine.stats().pages_free == engine.stats().pages_total
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_step_fails_its_requests_and_no_others():
    """The failure is raised in execution, after the pool was donated: pool and cache are rebuilt, the rest goes on."""
    engine = hand_engine(hand_model(bomb=63), max_batch_size=2)
    start = [1, 2, 3] * 10
    ask(engine, start, max_new_tokens=2).result()
    bad = ask(engine, [63], max_new_tokens=5)
    later = [ask(engine, prompt, max_new_tokens=20) for prompt in ([2, 4], [6], start)]
    result = bad.result()
    assert result.finish_reason == "error"
    assert "a step failed" in result.error
    outcomes = [inbox.result() for inbox in later]
    assert any(o.finish_reason == "length" for o in outcomes)
    settle(engine)
    assert engine.stats().failed_steps >= 1
    assert engine.stats().pages_free == engine.stats().pages_total
    again = ask(engine, start, max_new_tokens=2).result()
    assert again.cached_tokens in (0, 16)  # the old cache is gone; only what was computed since may be found
    assert list(again.token_ids) == continuation(start, 2)
    engine.close()


def test_a_step_that_can_not_be_launched_fails_its_own_sequences_only(monkeypatch):
    """The failure comes before the step is in flight. A sequence that decodes meanwhile is recomputed, or ends with an
    error if its own launch was lost with the pool."""
    engine = hand_engine(max_batch_size=2)
    running = ask(engine, [1, 2, 3], max_new_tokens=200)
    running.next()
    prefill = engine.programs.prefill

    def broken(chunks):
        if any(chunk.seq.tokens[0] == 9 for chunk in chunks):
            raise RuntimeError("no launch")
        return prefill(chunks)

    monkeypatch.setattr(engine.programs, "prefill", broken)
    result = ask(engine, [9], max_new_tokens=5).result()
    assert (result.finish_reason, result.token_ids) == ("error", ())
    # Launches of the running sequence may have been in flight, and are then lost with the pool.
    other = running.result()
    assert list(other.token_ids) == continuation([1, 2, 3], 200)[: len(other.token_ids)]
    assert list(ask(engine, [4], max_new_tokens=5).result().token_ids) == continuation([4], 5)
    assert engine.stats().failed_steps == 1
    engine.close()


def test_a_failed_score_is_answered():
    """Its last chunk is in flight when it fails."""
    engine = hand_engine(hand_model(bomb=63))
    assert "a step failed" in ask(engine, [1, 63, 2], score="nll").result().error
    assert list(ask(engine, [4], max_new_tokens=5).result().token_ids) == continuation([4], 5)
    settle(engine)
    assert engine.stats().pages_free == engine.stats().pages_total
    engine.close()


def test_a_defect_in_planning_ends_those_that_hold_pages(monkeypatch):
    """No step is under way that could be blamed."""
    engine = hand_engine(max_batch_size=1)
    next_chunks, broken = engine.scheduler.next_chunks, iter([True])

    def defect():
        if next(broken, False):
            raise RuntimeError("a defect")
        return next_chunks()

    monkeypatch.setattr(engine.scheduler, "next_chunks", defect)
    first, second = ask(engine, [1, 2], max_new_tokens=4), ask(engine, [3], max_new_tokens=4)
    assert first.result().error == "a step failed: a defect"
    assert list(second.result().token_ids) == continuation([3], 4)
    assert engine.stats().pages_free == engine.stats().pages_total
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("place", ["admit", "remove"])
def test_a_lasting_defect_of_the_scheduler_keeps_nobody_waiting(monkeypatch, place):
    """Nothing can be admitted, or let go of, any more: everybody is told, and new requests are refused."""

    def defect(*arguments):
        raise RuntimeError("a defect")

    engine = hand_engine(max_batch_size=2)
    inboxes = [ask(engine, [i] * 10, max_new_tokens=60) for i in range(6)]
    inboxes[0].next()
    monkeypatch.setattr(engine.scheduler, place, defect)
    for inbox in inboxes:
        result = inbox.result()
        assert result.finish_reason == "length" or "a defect" in result.error
    while not engine.closed:
        with contextlib.suppress(EngineClosed):
            ask(engine, [1]).result()
    with pytest.raises(EngineClosed, match="a defect"):
        ask(engine, [1])
    engine.close()


def test_close_frees_the_weights():
    """Even where the closed engine is not forgotten."""
    engine = hand_engine()
    weights = weakref.ref(engine.model.leaves[0])
    engine.close()
    gc.collect()
    assert weights() is None


def test_close_answers_everybody_and_may_be_called_twice():
    engine = hand_engine(session_len=512, cache_max_entry_count=257)
    inboxes = [ask(engine, [i] * 10, max_new_tokens=500) for i in range(12)]
    begin = time.monotonic()
    closers = [threading.Thread(target=engine.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    engine.close()
    assert time.monotonic() - begin < 10
    for inbox in inboxes:
        assert inbox.result(1).finish_reason in ("error", "length")
    with pytest.raises(EngineClosed):
        ask(engine, [1])


def test_scoring_does_not_stop_generation(engine):
    """Every other step is generation's: a short answer comes before a long row of prompts is scored."""
    scores = [ask(engine, [i] * 250, score="nll") for i in range(8)]
    short = ask(engine, [1, 2], max_new_tokens=4)
    assert list(short.result().token_ids) == continuation([1, 2], 4)
    assert any(inbox.outputs.empty() for inbox in scores)
    assert all(inbox.result().scores.shape == (249,) for inbox in scores)


def test_scores_go_through_the_pages_too(engine):
    prompt = prompts(1, 200, seed=15)[0] + [1] * 70
    nll = ask(engine, prompt, score="nll").result().scores
    logits = ask(engine, prompt, score="logits").result().scores
    assert logits.shape == (len(prompt), VOCAB)
    assert nll.shape == (len(prompt) - 1,)
    for i in (0, 63, 64, len(prompt) - 1):
        assert logits[i].argmax() == continuation(prompt[: i + 1], 1)[0]
