"""The engine thread around a real core (with a network of plain Python): streams, disconnects, limits, drain and death."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hash_engine import hash_engine
from tiny_models import save_tokenizer
from transformers import PreTrainedTokenizerFast

from foretoken.engine import draft_counts
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.boot import boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig
from foretoken.engine.core import EngineCore
from foretoken.engine.errors import ContextTooLong, EngineDead, QueueFull, RequestFailed, ShuttingDown
from foretoken.engine.request import SamplingParams, TokenDelta
from foretoken.engine.token_stream import TokenStream
from foretoken.proposers.config import NgramConfig, SpeculativeConfig
from foretoken.proposers.ngram import NgramProposer
from foretoken.proposers.proposer_set import ProposerSet

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make_engine(tokenizer: PreTrainedTokenizerFast, **settings: Any) -> Any:
    return hash_engine(tokenizer, ProposerSet([NgramProposer(NgramConfig(3, 2, 1))]), SpeculativeConfig(), **settings)


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> Any:
    return make_engine(tokenizer)


@asynccontextmanager
async def running(engine: Any) -> AsyncIterator[AsyncEngine]:
    driver = AsyncEngine(engine)
    await driver.start()
    try:
        yield driver
    finally:
        await driver.stop()


def run(engine: Any, scenario: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Play the scenario; afterwards the core must be idle and in order, unless it died."""

    async def play() -> None:
        async with running(engine) as driver:
            await scenario(driver)
            if driver.healthy:
                await becomes(lambda: not engine.core.has_work)
        if driver.stats().num_steps:
            engine.core.check()

    asyncio.run(asyncio.wait_for(play(), 60))


def played(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test that the scenario is. It gets the fixtures that it names, `engine` among them, and the `driver` that runs it."""

    def test(engine: Any, **others: Any) -> None:
        run(engine, lambda driver: scenario(engine=engine, driver=driver, **others))

    told = signature(scenario)
    vars(test)["__signature__"] = told.replace(parameters=[one for name, one in told.parameters.items() if name != "driver"])
    return test


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait for the other thread, or time out with the test."""
    while not condition():
        await asyncio.sleep(0.002)


async def collect(stream: TokenStream) -> list[TokenDelta]:
    return [delta async for delta in stream]


def tokens_of(deltas: list[TokenDelta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.choice == choice for token in delta.token_ids]


def slowed(engine: Any, seconds: float = 0.01) -> None:
    """Make each step take some time, so that a scenario can act in its middle."""
    step = engine.core.step

    def slow_step(now: float) -> list[TokenDelta]:
        time.sleep(seconds)
        return step(now)

    engine.core.step = slow_step


@played
async def test_what_was_guessed_lately_is_forgotten_while_nothing_happens(
    engine: Any, monkeypatch: pytest.MonkeyPatch, driver: AsyncEngine
) -> None:
    monkeypatch.setattr(draft_counts, "RECENT_WINDOW_S", 1)
    await collect(driver.generate([5, 6, 7] * 4, LONG, request_id="r"))
    assert driver.stats().num_draft_tokens > 0
    await becomes(lambda: driver.stats().recent_draft_tokens == 0)
    assert driver.stats() is driver.stats() and driver.stats().num_draft_tokens > 0


@pytest.mark.parametrize("pause_s", [0.0, 0.15])
@played
async def test_who_has_an_answer_finds_it_counted(engine: Any, pause_s: float, driver: AsyncEngine) -> None:
    """The text has a seed: one that happens to repeat itself would be guessed, and counts of late guesses change with time."""
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)
    for number in range(1, 20 if pause_s == 0 else 3):
        await collect(driver.generate([5, 6, 7], params, request_id=f"r{number}"))
        now = driver.stats()
        assert (now.generation_tokens, now.num_running) == (6 * number, 0)
        await asyncio.sleep(pause_s)
        assert driver.stats() is now, "a snapshot is good until something happens"


def test_every_choice_ends_once_with_the_cores_own_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    engine, reference = make_engine(tokenizer), make_engine(tokenizer).core
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    expected: dict[str, list[int]] = {}
    for request in engine.intake.requests("r", [7, 8, 9], params, 0.0):
        reference.add_request(request)
    while reference.has_work:
        for delta in reference.step(0.0):
            expected.setdefault(delta.request_id, []).extend(delta.token_ids)

    async def scenario(driver: AsyncEngine) -> None:
        stream = driver.generate([7, 8, 9], params, request_id="r")
        deltas = await collect(stream)
        assert {f"r-{choice}": tokens_of(deltas, choice) for choice in range(3)} == expected
        assert sorted(d.choice for d in deltas if d.finish_reason == "length") == [0, 1, 2]
        assert driver.num_in_flight == 0

    run(engine, scenario)


def test_many_at_once_each_get_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    engine, threads = make_engine(tokenizer, max_num_seqs=4), set[int]()
    step = engine.core.step
    engine.core.step = lambda now: (threads.add(threading.get_ident()), step(now))[1]

    async def scenario(driver: AsyncEngine) -> None:
        streams = [driver.generate([i + 1, 5], GREEDY, request_id=str(i)) for i in range(20)]
        together = [tokens_of(deltas) for deltas in await asyncio.gather(*map(collect, streams))]
        alone = [tokens_of(await collect(driver.generate([i + 1, 5], GREEDY, request_id=f"again-{i}"))) for i in range(20)]
        assert together == alone and all(len(tokens) == 20 for tokens in together)
        await becomes(lambda: driver.stats().generation_tokens == 800 and driver.stats().num_running == 0)

    run(engine, scenario)
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("leave", ["close", "cancel", "drop", "raise"])
@pytest.mark.parametrize("after", [0, 2])
@played
async def test_leaving_early_aborts_all_choices(engine: Any, leave: str, after: int, driver: AsyncEngine) -> None:
    slowed(engine)
    params = SamplingParams(n=2, max_tokens=200, ignore_eos=True)

    async def read(stream: TokenStream, error: bool) -> None:
        count = 0
        async for _ in stream:
            count += 1
            if error and count > after:
                raise KeyError("the reader's own mistake")
    stream = driver.generate([3], params, request_id="r")
    for _ in range(after):
        await anext(stream)
    match leave:
        case "close":
            stream.close()
            stream.close()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        case "cancel":
            task = asyncio.create_task(read(stream, error=False))
            await asyncio.sleep(0.03)
            task.cancel()
            await asyncio.wait([task])
        case "drop":
            pass
        case _:
            with pytest.raises(KeyError):
                await read(stream, error=True)
    del stream
    gc.collect()
    steps = engine.core.num_steps
    await becomes(lambda: not engine.core.has_work)
    assert engine.core.num_steps <= steps + 2  # the step in progress, and one that had begun before the command came
    assert driver.num_in_flight == 0 and engine.core.committer.generation_tokens < 400


@played
async def test_the_engine_does_not_wait_for_a_slow_reader(engine: Any, driver: AsyncEngine) -> None:
    expected = await collect(driver.generate([3], LONG, request_id="fast"))
    stream = driver.generate([3], LONG, request_id="slow")
    await becomes(lambda: driver.num_in_flight == 0)
    (delta,) = await collect(stream)
    assert delta.token_ids == tokens_of(expected) and len(delta.sources) == 200
    assert delta.text == "".join(d.text for d in expected)
    assert (delta.finish_reason, delta.stats) == ("length", expected[-1].stats)


def test_the_queue_is_bounded_and_choices_count(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(tokenizer, max_num_seqs=2, max_queued_requests=3)
    slowed(engine)

    async def scenario(driver: AsyncEngine) -> None:
        streams = [driver.generate([i + 1], GREEDY, request_id=str(i)) for i in range(4)]
        with pytest.raises(QueueFull) as caught:
            driver.generate([1], SamplingParams(n=2), request_id="two")
        assert 1 <= caught.value.retry_after_s <= 60
        streams.append(driver.generate([1], GREEDY, request_id="one"))
        with pytest.raises(QueueFull):
            driver.generate([1], GREEDY, request_id="no place")
        streams[0].close()
        streams[0] = driver.generate([1], GREEDY, request_id="a place again")
        assert all(len(tokens_of(deltas)) == 20 for deltas in await asyncio.gather(*map(collect, streams)))

    run(engine, scenario)


def test_an_idle_engine_takes_more_choices_than_the_queue_holds(tokenizer: PreTrainedTokenizerFast) -> None:
    async def scenario(driver: AsyncEngine) -> None:
        deltas = await collect(driver.generate([1], SamplingParams(n=6, max_tokens=2, ignore_eos=True), request_id="r"))
        assert len({d.choice for d in deltas}) == 6

    run(make_engine(tokenizer, max_num_seqs=2, max_queued_requests=1), scenario)


@played
async def test_a_wrong_request_is_refused_before_it_is_queued(engine: Any, driver: AsyncEngine) -> None:
    with pytest.raises(ContextTooLong):
        driver.generate([1] * 300, GREEDY, request_id="r")
    assert driver.num_in_flight == 0
    assert tokens_of(await collect(driver.generate([1], GREEDY, request_id="r")))


@played
async def test_drain_finishes_what_runs_and_takes_nothing_new(engine: Any, driver: AsyncEngine) -> None:
    slowed(engine, 0.002)
    reading = asyncio.create_task(collect(driver.generate([1], GREEDY, request_id="r")))
    await asyncio.sleep(0)
    driver.begin_drain()
    with pytest.raises(ShuttingDown):
        driver.generate([1], GREEDY, request_id="late")
    await driver.drain(30)
    assert len(tokens_of(await reading)) == 20


@played
async def test_drain_fails_what_outlasts_it(engine: Any, driver: AsyncEngine) -> None:
    slowed(engine)
    stream = driver.generate([1], LONG, request_id="r")
    first = await anext(stream)
    await driver.drain(0.05)
    with pytest.raises(RequestFailed) as caught:
        await collect(stream)
    assert first.token_ids and caught.value.code == "server_shutdown"
    await becomes(lambda: not engine.core.has_work)


def test_stop_ends_thread_and_streams(engine: Any) -> None:
    slowed(engine)

    async def play() -> None:
        async with running(engine) as driver:
            assert driver.healthy
            stream = driver.generate([1], LONG, request_id="r")
        assert not driver.healthy
        with pytest.raises(RequestFailed):
            await collect(stream)
        with pytest.raises(ShuttingDown):
            driver.generate([1], GREEDY, request_id="late")

    asyncio.run(asyncio.wait_for(play(), 30))


def test_a_dead_engine_tells_everyone(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    step = engine.core.step

    def fatal(now: float) -> list[TokenDelta]:
        if engine.core.num_steps == 3:
            raise MemoryError("device lost")
        return step(now)

    engine.core.step = fatal

    async def scenario(driver: AsyncEngine) -> None:
        streams = [driver.generate([i], LONG, request_id=str(i)) for i in (1, 2)]
        for result in await asyncio.gather(*map(collect, streams), return_exceptions=True):
            assert isinstance(result, EngineDead)
        assert not driver.healthy
        with pytest.raises(EngineDead):
            driver.generate([1], GREEDY, request_id="late")

    run(engine, scenario)
    assert "device lost" in caplog.text


@played
async def test_a_hanging_step_is_seen(engine: Any, driver: AsyncEngine) -> None:
    go_on = threading.Event()
    step = engine.core.step
    engine.core.step = lambda now: (go_on.wait(30), step(now))[1]
    assert driver.last_step_age_s == 0.0
    reading = asyncio.create_task(collect(driver.generate([1], GREEDY, request_id="r")))
    await becomes(lambda: driver.last_step_age_s > 0.1)
    assert driver.healthy
    go_on.set()
    await reading
    await becomes(lambda: driver.last_step_age_s == 0.0)


@played
async def test_work_between_steps_that_hangs_is_seen(engine: Any, driver: AsyncEngine) -> None:
    go_on = threading.Event()
    called = asyncio.create_task(driver.call(lambda core: go_on.wait(30)))
    await becomes(lambda: driver.last_step_age_s > 0.1)
    go_on.set()
    assert await called
    await becomes(lambda: driver.last_step_age_s == 0.0)


def test_a_booted_engine_says_the_same_as_offline(tiny_target: Path) -> None:
    config = EngineConfig(ModelConfig(str(tiny_target), dtype="float32"), CacheConfig(num_blocks=64))
    engine = boot(config)
    prompt = engine.intake.encode("one two one two one")
    requests = engine.intake.requests("offline", prompt, GREEDY, 0.0)
    engine.core.add_request(requests[0])
    expected: list[TokenDelta] = []
    while engine.core.has_work:
        expected.extend(engine.core.step(0.0))

    async def scenario(driver: AsyncEngine) -> None:
        deltas = await collect(driver.generate(prompt, GREEDY, request_id="r"))
        assert tokens_of(deltas) == tokens_of(expected)
        assert "".join(d.text for d in deltas) == "".join(d.text for d in expected)

    run(engine, scenario)


@pytest.mark.parametrize("seed", range(5))
def test_readers_of_every_kind(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Random arrivals, sleeps and departures; whoever stays gets the whole output, and nothing is left behind."""
    dice = random.Random(seed)

    async def reader(driver: AsyncEngine, name: str) -> None:
        await asyncio.sleep(dice.random() * 0.05)
        params = SamplingParams(n=dice.randint(1, 3), temperature=0, max_tokens=dice.randint(1, 60), ignore_eos=True)
        leave_after = dice.choice([None, None, 0, 1, 5])
        stream, deltas = driver.generate([dice.randint(1, 99)] * dice.randint(1, 30), params, request_id=name), []
        while leave_after is None or len(deltas) < leave_after:
            try:
                deltas.append(await anext(stream))
            except StopAsyncIteration:
                break
            await asyncio.sleep(dice.choice([0, 0, 0.003]))
        if leave_after is None:
            assert [len(tokens_of(deltas, choice)) for choice in range(params.n)] == [params.max_tokens] * params.n
        elif dice.random() < 0.5:
            stream.close()

    async def scenario(driver: AsyncEngine) -> None:
        await asyncio.gather(*(reader(driver, f"r{i}") for i in range(30)))
        await becomes(lambda: driver.num_in_flight == 0)

    run(make_engine(tokenizer, max_num_seqs=5), scenario)


@played
async def test_work_is_done_between_steps_by_the_engine_thread(engine: Any, driver: AsyncEngine) -> None:
    def work(core: EngineCore) -> tuple[str, int]:
        return threading.current_thread().name, core.num_steps

    assert await driver.call(work) == ("foretoken-engine", 0)  # idle
    stream = driver.generate([7, 8, 9], LONG, request_id="r")
    await anext(stream)
    name, num_steps = await driver.call(work)
    assert name == "foretoken-engine" and num_steps > 0 and driver.num_in_flight == 1
    with pytest.raises(ZeroDivisionError):
        await driver.call(lambda core: 1 // 0)
    assert len(tokens_of(await collect(stream))) > 0 and driver.healthy


@played
async def test_who_waits_for_work_hears_of_the_end(engine: Any, driver: AsyncEngine) -> None:
    slowed(engine, 0.1)
    stream = driver.generate([7, 8, 9], LONG, request_id="r")
    await anext(stream)

    def dies(core: EngineCore) -> None:
        raise SystemExit  # nothing a caller's work should do

    waiting = [asyncio.ensure_future(driver.call(work)) for work in (dies, lambda core: None)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead, EngineDead]
    with pytest.raises(EngineDead):
        await driver.call(lambda core: None)
    stream.close()


def test_stopping_closes_the_core_once(engine: Any) -> None:
    closings: list[str] = []
    engine.core.close = lambda: closings.append(threading.current_thread().name)

    async def scenario(driver: AsyncEngine) -> None:
        await collect(driver.generate([7], GREEDY, request_id="r"))
        await driver.stop()
        assert closings == ["foretoken-engine"]

    run(engine, scenario)
    assert len(closings) == 1
