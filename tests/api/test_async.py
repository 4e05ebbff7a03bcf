"""The async twins, inside an event loop that runs."""

import asyncio
import dataclasses
import time

import pytest

from pallasite import EngineClosed, GenerationConfig

PROMPTS = ["hello", "The quick brown fox", "a"]
SHORT = GenerationConfig(max_new_tokens=12, ignore_eos=True)
MANY = GenerationConfig(max_new_tokens=200, ignore_eos=True)


def test_the_same_answers(pipe):
    async def ask():
        single = await pipe.agenerate("hello", SHORT)
        several = await pipe.agenerate(PROMPTS, SHORT)
        gathered = await asyncio.gather(*(pipe.agenerate(text, SHORT) for text in PROMPTS))
        streamed: dict[int, list[str]] = {0: [], 1: [], 2: []}
        async for piece in pipe.astream_infer(PROMPTS, SHORT):
            streamed[piece.index].append(piece.text)
        return single, several, gathered, ["".join(streamed[i]) for i in range(3)]

    single, several, gathered, streamed = asyncio.run(ask())
    expected = pipe(PROMPTS, SHORT)
    assert single.token_ids == expected[0].token_ids
    assert [r.token_ids for r in several] == [r.token_ids for r in expected]
    assert [r.token_ids for r in gathered] == [r.token_ids for r in expected]
    assert streamed == [r.text for r in expected]


def test_chat(pipe):
    async def talk():
        session = await pipe.achat("hello", gen_config=SHORT)
        return await pipe.achat("And then?", session, SHORT)

    session = asyncio.run(talk())
    again = pipe.chat("And then?", pipe.chat("hello", gen_config=SHORT), SHORT)
    assert session.messages == again.messages
    assert session.response.cached_tokens > 0
    with pytest.raises(ValueError, match="n is 2"):
        asyncio.run(pipe.achat("hello", gen_config=dataclasses.replace(SHORT, n=2)))


def test_wrong_prompts(pipe):
    async def ask():
        with pytest.raises(ValueError, match="the prompt is empty"):
            await pipe.agenerate("", SHORT)
        with pytest.raises(ValueError, match="gen_config holds 1 configs for 3 prompts"):
            await pipe.agenerate(PROMPTS, [SHORT])
        with pytest.raises(ValueError, match="the prompt is empty"):
            await anext(pipe.astream_infer("", SHORT))
        return await pipe.agenerate(["hello", "", "a"], SHORT)

    assert [r.finish_reason for r in asyncio.run(ask())] == ["length", "error", "length"]


def test_the_loop_goes_on_meanwhile(pipe):
    """An answer that takes a while does not hold up what else runs in the loop."""

    async def ask():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await pipe.agenerate(PROMPTS, MANY)
        ticking.cancel()
        return ticks

    assert asyncio.run(ask()) > 10


async def read_all(stream) -> None:
    async for _ in stream:
        pass


def generated(pipe) -> int:
    return pipe.frontend.engine.stats().generated_tokens


@pytest.mark.parametrize("call", ["agenerate", "achat"])
def test_a_cancelled_task_cancels_its_requests(pipe, call):
    before = generated(pipe)

    async def ask():
        batch = call == "agenerate"
        work = pipe.agenerate(["hello"] * 16, MANY) if batch else pipe.achat("hello", gen_config=MANY)
        task = asyncio.create_task(work)
        while generated(pipe) == before:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await pipe.agenerate("a", SHORT)

    assert asyncio.run(ask()).finish_reason == "length"
    assert generated(pipe) - before < (16 * 200 if call == "agenerate" else 200) * 0.8


def test_a_task_cancelled_at_once(pipe):
    """Before its requests are even in the queue."""

    async def ask():
        tasks = [asyncio.create_task(pipe.agenerate(["hello"] * 4, MANY)) for _ in range(8)]
        for i, task in enumerate(tasks):
            await asyncio.sleep(0.001 * i)
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(r, asyncio.CancelledError) for r in asyncio.run(ask()))


def test_a_task_cancelled_while_the_queue_is_full(open_small):
    """Its request waits for a place, in a thread that can't be stopped. Then nothing is generated."""
    with open_small(max_batch_size=1, max_queue_size=1) as pipe:

        async def ask():
            others = [asyncio.create_task(pipe.agenerate([5 + i], MANY)) for i in range(2)]
            while pipe.frontend.engine.stats().waiting < 1:
                await asyncio.sleep(0)
            late = asyncio.create_task(pipe.agenerate([7], dataclasses.replace(MANY, n=2)))
            await asyncio.sleep(0.01)
            late.cancel()
            await asyncio.gather(*others)
            with pytest.raises(asyncio.CancelledError):
                await late

        asyncio.run(ask())  # returns when the thread has ended
        assert pipe("a", SHORT).finish_reason == "length"
        assert generated(pipe) < 2 * 200 + 100


@pytest.mark.parametrize("how", ["break", "aclose", "timeout"])
def test_an_abandoned_stream_is_cancelled(pipe, how):
    before = generated(pipe)

    async def ask():
        stream = pipe.astream_infer(["hello"] * 16, MANY)
        if how == "aclose":
            await anext(stream)
            await stream.aclose()
        elif how == "break":
            async for _ in stream:
                break
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read_all(stream), 0.02)
        del stream
        await asyncio.sleep(0)
        return await pipe.agenerate("a", SHORT)

    assert asyncio.run(ask()).finish_reason == "length"
    assert generated(pipe) - before < 16 * 200 / 2


def test_a_loop_that_ends_under_a_stream(pipe):
    """asyncio.run is left with a stream open: it is closed with the loop, and nobody waits for the engine."""

    async def ask():
        stream = pipe.astream_infer(["hello"] * 16, MANY)
        await anext(stream)
        return stream

    start = time.monotonic()
    stream = asyncio.run(ask())
    assert time.monotonic() - start < 5
    del stream
    assert pipe("a", SHORT).finish_reason == "length"


def test_after_close(open_small):
    with open_small() as pipe:
        assert (
            asyncio.run(pipe.agenerate("hello", dataclasses.replace(SHORT, max_new_tokens=1))).generate_token_len == 1
        )

    async def ask():
        for work in (pipe.agenerate("hello"), pipe.achat("hello"), anext(pipe.astream_infer("hello"))):
            with pytest.raises(EngineClosed, match="the engine is closed"):
                await work

    asyncio.run(ask())
