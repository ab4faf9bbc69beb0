"""Embeddings on whole engines with tiny networks: right in every executor, in any chunks, and without a trace in the cache."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.engine import embedding
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.boot import Engine, boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.engine.embedding import Embedder
from foretoken.engine.errors import ContextTooLong, EngineDead, InvalidRequest, QueueFull, RequestFailed, ShuttingDown
from foretoken.engine.origin import Origin
from foretoken.engine.request import SamplingParams, TokenDelta
from foretoken.kernels.layout import RaggedBatch
from foretoken.proposers.config import NgramConfig, SpeculativeConfig

TEXTS = [[7 * i % 290 + 5 for i in range(length)] for length in (1, 40, 3, 100, 17)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def start(target: Path, executor: str = "native", budget: int = 24, blocks: int = 32, **settings: Any) -> Engine:
    return boot(
        EngineConfig(
            ModelConfig(str(target), dtype="float32", executor=executor),
            CacheConfig(num_blocks=blocks),
            SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=8),
            SpeculativeConfig((NgramConfig(3, prompt_lookup_min=1, prompt_lookup_max=2),), adaptive=False),
            **settings,
        )
    )


def play(engine: Engine, scenario: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Afterwards the core must be in order, with nothing borrowed."""

    async def run() -> None:
        driver = AsyncEngine(engine)
        await driver.start()
        try:
            await scenario(driver)
            while engine.core.has_work:
                await asyncio.sleep(0.002)
        finally:
            await driver.stop()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not engine.core.scheduler.kv.scratch
    engine.core.check()


def embedded(engine: Engine, texts: list[list[int]], pooling: embedding.Pooling = "last") -> Tensor:
    found: list[Tensor] = []

    async def scenario(driver: AsyncEngine) -> None:
        found.append(await Embedder(driver).embed(texts, pooling))

    play(engine, scenario)
    return found[0]


@pytest.fixture(scope="module")
def expected(tiny_target: Path) -> dict[str, Tensor]:
    """What transformers makes of each text, alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with torch.no_grad():
        states = [model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0] for text in TEXTS]
    pooled = {"last": torch.stack([state[-1] for state in states]), "mean": torch.stack([state.mean(0) for state in states])}
    return {name: vectors / vectors.norm(dim=-1, keepdim=True) for name, vectors in pooled.items()}


@pytest.mark.parametrize("executor", ["native", "torch", "transformers"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_the_networks_last_states(
    tiny_target: Path, expected: dict[str, Tensor], executor: str, pooling: embedding.Pooling
) -> None:
    vectors = embedded(start(tiny_target, executor), TEXTS, pooling)  # of 24 tokens a pass: most texts take several
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, expected[pooling], atol=2e-4, rtol=0)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(len(TEXTS)))


def test_chunks_change_nothing(tiny_target: Path) -> None:
    assert torch.equal(embedded(start(tiny_target, budget=8), TEXTS), embedded(start(tiny_target, budget=400), TEXTS))


def test_requests_go_on_between_passes_and_say_the_same(tiny_target: Path) -> None:
    engine = start(tiny_target)
    sizes: list[int] = []  # of passes while a request runs
    told: list[list[int]] = []
    final_states = engine.core.runner.final_states

    def spied(plan: Any) -> Tensor:
        if engine.core.has_work:
            sizes.append(plan.num_tokens)
        return final_states(plan)

    engine.core.runner.final_states = spied
    step = engine.core.step

    def slow_step(now: float) -> list[TokenDelta]:
        time.sleep(0.005)  # so that texts come while it runs
        return step(now)

    engine.core.step = slow_step

    async def scenario(driver: AsyncEngine) -> None:
        embedder = Embedder(driver)
        prompt = TEXTS[1]
        told.append([token async for delta in driver.generate(prompt, GREEDY, request_id="alone") for token in delta.token_ids])
        stream = driver.generate(prompt, GREEDY, request_id="beside", origin=Origin(cache_salt="another"))
        first = await anext(stream)
        tasks = [asyncio.create_task(embedder.embed(TEXTS)) for _ in range(3)]
        told.append(first.token_ids + [token async for delta in stream for token in delta.token_ids])
        vectors = await asyncio.gather(*tasks)
        assert all(torch.equal(one, vectors[0]) for one in vectors)
        assert driver.num_guests == 0

    play(engine, scenario)
    assert told[0] == told[1]
    assert sizes and max(sizes) <= 24 // embedding.BUSY_SHARE


def test_the_prefix_cache_is_neither_read_nor_written(tiny_target: Path) -> None:
    engine = start(tiny_target)
    kv = engine.core.scheduler.kv

    async def scenario(driver: AsyncEngine) -> None:
        async for _ in driver.generate(TEXTS[3], GREEDY, request_id="r"):
            pass
        before = dict(kv.pool.by_digest), kv.num_queried_tokens, kv.num_hit_tokens
        await Embedder(driver).embed([TEXTS[3]])
        assert (dict(kv.pool.by_digest), kv.num_queried_tokens, kv.num_hit_tokens) == before

    play(engine, scenario)


def test_places_come_back_when_a_pass_fails_and_when_the_caller_leaves(tiny_target: Path) -> None:
    engine = start(tiny_target, budget=8)
    run: Callable[..., Any] = engine.core.runner.executor.run
    passes: list[int] = []
    has_left = threading.Event()

    def failing(batch: RaggedBatch, *arguments: Any) -> Any:
        passes.append(len(batch.token_ids))
        if len(passes) == 3:
            raise RuntimeError("the pass breaks")
        if len(passes) == 5:
            assert has_left.wait(30)
        return run(batch, *arguments)

    async def scenario(driver: AsyncEngine) -> None:
        embedder, kv = Embedder(driver), engine.core.scheduler.kv
        setattr(engine.core.runner.executor, "run", failing)  # noqa: B010 - a method
        with pytest.raises(RuntimeError, match="the pass breaks"):
            await embedder.embed([TEXTS[3]])
        assert not kv.scratch and driver.num_guests == 0
        task = asyncio.create_task(embedder.embed([TEXTS[3]]))
        while len(passes) < 5:
            await asyncio.sleep(0)
        task.cancel()
        asyncio.get_running_loop().call_soon(has_left.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(passes) < 3 + -(-len(TEXTS[3]) // 8) and not kv.scratch
        assert (await embedder.embed(TEXTS)).shape[0] == len(TEXTS)

    play(engine, scenario)


def test_texts_wait_for_free_blocks(tiny_target: Path) -> None:
    engine = start(tiny_target, blocks=9)  # 144 places: the request takes 112 of them
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

    async def scenario(driver: AsyncEngine) -> None:
        held: list[bool] = await driver.call(lambda core: [core.scheduler.kv.open_scratch("another", 112)])
        assert held == [True]
        task = asyncio.create_task(Embedder(driver).embed([TEXTS[3]]))
        await asyncio.sleep(3 * embedding.RETRY_S)
        assert not task.done()
        assert [token async for delta in driver.generate(TEXTS[4], params, request_id="r") for token in delta.token_ids]
        await driver.call(lambda core: core.scheduler.kv.free("another"))
        assert (await task).shape == (1, 64)

    play(engine, scenario)


def test_what_is_refused(tiny_target: Path) -> None:
    engine = start(tiny_target, max_queued_requests=1)

    async def scenario(driver: AsyncEngine) -> None:
        embedder = Embedder(driver)
        with pytest.raises(InvalidRequest, match="empty"):
            await embedder.embed([[]])
        with pytest.raises(InvalidRequest, match="token id 300"):
            await embedder.embed([[300]])
        with pytest.raises(ContextTooLong, match="513 tokens"):
            await embedder.embed([[5] * 513])
        assert (await embedder.embed([[5] * 512])).shape == (1, 64)  # nothing is generated, so it may fill the context
        first = asyncio.create_task(embedder.embed(TEXTS))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await embedder.embed(TEXTS)
        await first
        driver.begin_drain()
        with pytest.raises(ShuttingDown):
            await embedder.embed(TEXTS)

    play(engine, scenario)

    async def dead() -> None:
        with pytest.raises(EngineDead):
            await Embedder(AsyncEngine(engine)).embed(TEXTS)

    asyncio.run(dead())


def test_states_that_are_no_numbers_fail_the_request(tiny_target: Path) -> None:
    engine = start(tiny_target)
    engine.core.runner.final_states = lambda plan: torch.full((plan.num_tokens, 64), float("nan"))

    async def scenario(driver: AsyncEngine) -> None:
        with pytest.raises(RequestFailed) as error:
            await Embedder(driver).embed(TEXTS)
        assert error.value.code == "numerical_error"

    play(engine, scenario)


def test_a_drain_waits_for_texts_and_fails_what_outlasts_it(tiny_target: Path) -> None:
    engine = start(tiny_target, budget=8)
    final_states = engine.core.runner.final_states

    def slow(plan: Any) -> Tensor:
        time.sleep(0.005)
        return final_states(plan)

    engine.core.runner.final_states = slow

    async def waited_for(driver: AsyncEngine) -> None:
        task = asyncio.create_task(Embedder(driver).embed(TEXTS))
        await asyncio.sleep(0)
        assert driver.num_guests == 1
        await driver.drain(30)
        assert (await task).shape[0] == len(TEXTS)

    async def outlasting(driver: AsyncEngine) -> None:
        task = asyncio.create_task(Embedder(driver).embed(TEXTS))
        await asyncio.sleep(0)
        await driver.drain(0.0)
        with pytest.raises(RequestFailed) as error:
            await task
        assert error.value.code == "server_shutdown"

    play(engine, waited_for)
    play(engine, outlasting)


def test_texts_count_as_prompts(tiny_target: Path) -> None:
    engine = start(tiny_target)

    async def scenario(driver: AsyncEngine) -> None:
        await Embedder(driver).embed(TEXTS)

    play(engine, scenario)
    assert engine.core.stats().prompt_tokens == sum(map(len, TEXTS))
