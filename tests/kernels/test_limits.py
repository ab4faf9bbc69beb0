import pytest

from foretoken.kernels import limits, native_library


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the library, and as on a machine without it."""
    if request.param == "torch":
        monkeypatch.setattr(native_library, "load", lambda: None)
    elif native_library.load() is None:
        pytest.skip("the native library is not built")
    return request.param


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_read_rate_is_one_that_a_machine_can_have(way: str, threads: int) -> None:
    """More threads than cores, too: a thread that waits for a core must not make the others' work look instant."""
    with limits.ReadBuffer(40_000_001) as buffer:
        assert 0 <= 40_000_001 - buffer.num_bytes < limits.CHUNK
        assert 1e8 < buffer.read_rate(threads, passes=4) < 2e12


def test_a_small_buffer_is_a_whole_chunk(way: str) -> None:
    with limits.ReadBuffer(1) as buffer:
        assert buffer.num_bytes == limits.CHUNK
        assert buffer.read_rate(1, passes=50) > 1e8


def test_narrow_products_are_not_slower() -> None:
    if native_library.availability().isa is None:
        pytest.skip("no AVX2")
    rates = {kind: max(limits.operations_per_second(kind, 1, 0.01) or 0 for _ in range(5)) for kind in limits.KINDS}
    assert 1e9 < rates["float32"] < 1e14
    for kind in ("bfloat16", "int8"):
        assert rates[kind] == 0 or rates[kind] > rates["float32"]


def test_without_the_library_the_arithmetic_peak_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "load", lambda: None)
    assert limits.operations_per_second("float32", 1) is None
