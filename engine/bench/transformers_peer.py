"""transformers' own `generate`, as a program beside ours: what users have before they have a server.

It runs in a process of its own, so that its thread pool and ours never share one. `TransformersPeer` is the near side; run as a
module, this file is the far side: a line of JSON for each request and for each answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError


@dataclass(frozen=True)
class PeerAnswer:
    """What one call gave."""

    token_ids: list[list[int]]  # per prompt, new tokens only
    seconds: float
    first_s: float  # until the first token of all prompts


class TransformersPeer:
    """A model in transformers. Use it as a context; raises ModelLoadError on entry if it cannot be loaded."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        self._folder = folder
        flags = ["--model", str(folder), "--dtype", dtype, "--threads", str(threads)]
        self._command = [sys.executable, "-m", "foretoken.engine.bench.transformers_peer", *flags]

    def __enter__(self) -> TransformersPeer:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True)
        try:
            self._read()  # it says that it is ready
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> PeerAnswer:
        """Greedy continuations of all prompts in one call, shorter ones padded on the left."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens, "ignore_eos": ignore_eos}) + "\n")
        self._process.stdin.flush()
        return PeerAnswer(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = (self._log.read().strip().splitlines() or ["without a word"])[-1]
            raise ModelLoadError(f"transformers ended while running {self._folder}: {last}")
        return json.loads(line)


def main() -> None:
    """The far side."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--dtype", "--threads"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class FirstToken(StoppingCriteria):
        """Never stops; asked after every step, it knows when the first one was over."""

        def __init__(self) -> None:
            self.time: float | None = None

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
            self.time = self.time or time.perf_counter()
            return torch.BoolTensor([False] * len(input_ids))

    torch.set_num_threads(int(args.threads))
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype), local_files_only=True).eval()
    ends = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig()  # a folder's sampling defaults are not greedy
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    pad = ends[0] if ends else 0
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts, longest = request["prompts"], max(map(len, request["prompts"]))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        first = FirstToken()
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=request["max_tokens"],
                do_sample=False,
                eos_token_id=None if request["ignore_eos"] else ends or None,
                pad_token_id=pad,
                stopping_criteria=StoppingCriteriaList([first]),
            )
        seconds = time.perf_counter() - started
        stops = set() if request["ignore_eos"] else set(ends)
        tokens = [until(row, stops) for row in output[:, longest:].tolist()]
        print(json.dumps(asdict(PeerAnswer(tokens, seconds, (first.time or started) - started))), file=answers, flush=True)


def until(tokens: list[int], stops: set[int]) -> list[int]:
    """[5, 6, END, PAD] -> [5, 6, END]"""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))]


if __name__ == "__main__":
    main()
