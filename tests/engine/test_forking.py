import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing, sys, threading, torch
from foretoken import LLM, SamplingParams

def made():
    return LLM(sys.argv[1], {"method": "off"}, kv_cache_gb=0.005, dtype="float32", executor=sys.argv[2], threads=2)

def answer(llm):
    torch.ones(500, 500) @ torch.ones(500, 500)
    return llm.generate("The quick", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids

def forked(work):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(work()))
    child.start()
    try:
        return queue.get(timeout=60)
    finally:
        child.kill()

torch.set_num_threads(2)
llm = made()
said = answer(llm)
assert forked(lambda: answer(made())) == said, "a new engine in a fork"
assert forked(lambda: answer(llm)) == said, "the parent's own"
assert forked(lambda: forked(lambda: answer(made()))) == said, "a fork of a fork"
assert answer(llm) == said and torch.get_num_threads() == 2
llm.shutdown()
assert forked(lambda: answer(made())) == said
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.parametrize("executor", ["native", "torch"])
def test_an_engine_runs_in_a_process_that_is_forked_from_one_with_an_engine(tiny_target: Path, executor: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tiny_target), executor]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
