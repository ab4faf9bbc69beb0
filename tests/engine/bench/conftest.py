"""An effort that takes no time, and a subject to spend it on."""

from pathlib import Path

import pytest

from foretoken.engine.bench.checkpoints import Model
from foretoken.engine.bench.measurement import Effort, Subject


@pytest.fixture
def effort() -> Effort:
    return Effort(
        rounds=1, slot_s=0.001, decode_tokens=8, contexts=(32, 64, 128), verified=(1, 2, 5), rows=(1, 3), decode_contexts=(48,),
        prompt_tokens=40, verified_context=64, rows_context=64, load_prompt_tokens=24,
    )


@pytest.fixture
def subject(tiny_target: Path) -> Subject:
    return Subject(Model("tiny", "a tiny model", tiny_target), "float32", threads=1)
