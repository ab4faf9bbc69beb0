"""What a reader sees of the deltas put for them."""

import asyncio

import pytest

from foretoken.engine.errors import RequestFailed
from foretoken.engine.request import SpeculationStats, TokenDelta, TokenLogprobs
from foretoken.engine.token_stream import MAX_PENDING, TokenStream, merge


def delta(token: int, request_id: str = "r", finish: bool = False) -> TokenDelta:
    logprobs = [TokenLogprobs(-float(token), 1, ())]
    stats = SpeculationStats(num_steps=token) if finish else None
    return TokenDelta(request_id, 0, [token], chr(97 + token % 26), [-1], logprobs, "length" if finish else None, stats=stats)


def test_merging_loses_nothing() -> None:
    merged = merge([delta(1), delta(2), delta(3, finish=True)])
    assert (merged.token_ids, merged.text, merged.sources, merged.finish_reason) == ([1, 2, 3], "bcd", [-1] * 3, "length")
    assert merged.logprobs is not None and [said.logprob for said in merged.logprobs] == [-1.0, -2.0, -3.0]
    assert merged.stats == SpeculationStats(num_steps=3)
    assert merged.num_passes == 3


def test_a_sleeping_reader_costs_no_more_than_the_text() -> None:
    async def play() -> None:
        stream = TokenStream(["r"], lambda ids: None)
        total = 10 * MAX_PENDING
        for token in range(total):
            stream.put(delta(token, finish=token == total - 1))
            assert len(stream._pending["r"]) <= MAX_PENDING
        (whole,) = [part async for part in stream]
        assert whole.token_ids == list(range(total))

    asyncio.run(play())


def test_choices_are_merged_apart_and_both_must_end() -> None:
    async def play() -> None:
        aborted: list[str] = []
        stream = TokenStream(["a", "b"], aborted.extend)
        for token in (1, 2):
            stream.put(delta(token, "a"))
            stream.put(delta(token, "b"))
        stream.put(delta(3, "a", finish=True))
        assert [(await anext(stream)).token_ids for _ in range(2)] == [[1, 2, 3], [1, 2]]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        assert aborted == ["b"]  # a cancelled reader wants no more

    asyncio.run(play())


def test_a_tap_comes_before_a_reader_who_waits_and_only_then() -> None:
    async def play() -> None:
        stream = TokenStream(["r"], lambda ids: None)
        tapped: list[int] = []

        def tap(delta: TokenDelta) -> bool:
            tapped.extend(token for token in delta.token_ids if token != 4)
            return 4 not in delta.token_ids

        stream.tap(tap)
        stream.put(delta(1))  # nobody waits yet
        assert (await anext(stream)).token_ids == [1]
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        stream.put(delta(2))
        stream.put(delta(3))
        stream.put(delta(4))  # which is not taken: the reader has it, and all that comes until it is back
        stream.put(delta(5))
        assert tapped == [2, 3] and (await reader).token_ids == [4, 5]
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        stream.put(delta(6))
        stream.put(delta(7, finish=True))
        assert tapped == [2, 3, 6] and (await reader).token_ids == [7]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(play())


def test_an_error_comes_after_what_was_there() -> None:
    async def play() -> None:
        aborted: list[str] = []
        stream = TokenStream(["r"], aborted.extend)
        stream.put(delta(1))
        stream.fail(RequestFailed("over", "server_shutdown"))
        assert (await anext(stream)).token_ids == [1]
        with pytest.raises(RequestFailed):
            await anext(stream)
        assert aborted == ["r"]
        del stream
        assert aborted == ["r"]

    asyncio.run(play())
