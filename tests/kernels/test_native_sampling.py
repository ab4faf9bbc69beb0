"""The native race against the one in torch, its struct against the header; filters and edits are tested with the sampler."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.kernels import noise, sampling

HEADER = Path(sampling.__file__).parent / "native" / "sampling.h"
needs_library = pytest.mark.skipif(not sampling.available(), reason="no native library for this machine")
BYTES = {"float": 4, "int32_t": 4, "int64_t": 8, "double": 8}


def keys(n: int, seed: int = 0) -> torch.Tensor:
    return noise.keys([noise.stream(seed, 0)] * n, list(range(n)))


def test_rows_are_laid_out_as_in_the_header() -> None:
    struct = re.search(r"struct SampleRow \{(.*?)\n\};", HEADER.read_text(), re.DOTALL)
    assert struct is not None
    fields: list[tuple[str, int]] = []
    for line in struct[1].splitlines():
        if declaration := re.match(r"\s*(?:const )?(\w+)(\*?) ([\w, ]+);", line):
            size = 8 if declaration[2] else BYTES[declaration[1]]
            fields += [(name, size) for name in declaration[3].split(", ")]
    assert sampling.ROW.fields is not None
    described = [(name, field[0].itemsize, field[1]) for name, field in sampling.ROW.fields.items()]
    offsets = np.cumsum([0] + [size for _, size in fields])[:-1].tolist()  # nothing is padded on either side
    assert described == [(name, size, offset) for (name, size), offset in zip(fields, offsets, strict=True)]


@needs_library
@pytest.mark.parametrize("vocab_size", [1, 5, 16, 127, 128, 129, 300, 2048, 5000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 30.0])
def test_the_same_tokens_as_in_torch(vocab_size: int, scale: float) -> None:
    n = 200
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    logits[::3, 1::5] = -math.inf
    before = logits.clone()
    tokens = sampling.race(logits, keys(n))
    assert torch.equal(logits, before)
    close = noise.margin(logits, keys(n)) < 1e-5 if vocab_size > 1 else torch.zeros(n, dtype=torch.bool)
    assert torch.equal(tokens[~close], noise.draw(torch.softmax(logits, -1), keys(n))[~close])
    assert close.sum() < 5


@needs_library
def test_rows_may_lie_apart() -> None:
    wide = torch.randn(9, 700, generator=torch.Generator().manual_seed(1))
    part = wide[::2, :300]
    assert sampling.takes(part) and not sampling.takes(wide.T[:300]) and not sampling.takes(wide.double())
    assert torch.equal(sampling.race(part, keys(5)), sampling.race(part.contiguous(), keys(5)))


@needs_library
def test_a_place_matters_only_if_its_parent_got_the_guess() -> None:
    logits = torch.full((6, 50), -50.0)
    logits[range(6), [7, 8, 9, 1, 2, 3]] = 50.0
    rows = sampling.neutral(6)
    rows["logits"] = sampling.rows_of(logits, np.arange(6))
    rows["key"] = keys(6).numpy()
    #        root, guessed right, wrong, below the wrong one, below the right one; another root
    rows["parent"] = [-1, 0, 0, 2, 1, -1]
    rows["guess"] = [-1, 7, 4, 9, 8, -1]
    assert sampling.sample(rows, 50).tolist() == [7, 8, -1, -1, 2, 3]


@needs_library
def test_allowed_tokens_are_a_bit_mask() -> None:
    vocab_size = 77  # the last word is used in part
    logits = torch.zeros(1, vocab_size)
    allowed = [3, 31, 32, 64, 76]
    bits = np.zeros(3, np.uint32)
    for token in allowed:
        bits[token // 32] |= np.uint32(1 << token % 32)
    rows = sampling.neutral(300)
    rows["logits"] = logits.data_ptr()
    rows["key"] = keys(300).numpy()
    rows["allowed"] = bits.ctypes.data
    assert sorted(set(sampling.sample(rows, vocab_size).tolist())) == allowed
    logits[0, 4] = math.nan  # what is not allowed is not looked at
    assert sorted(set(sampling.sample(rows, vocab_size).tolist())) == allowed
    logits[0, 3] = math.nan
    assert set(sampling.sample(rows, vocab_size).tolist()) == {-1}
