"""Greedy output equals `transformers.generate`, for every lowered family, by every way of running a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, QUICK_FAMILIES, save_tokenizer, tiny_config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from variants import slow_but

from foretoken.engine.boot import boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.engine.request import SamplingParams
from foretoken.kernels import native
from foretoken.proposers.config import DraftModelConfig, NgramConfig, SpeculativeConfig

NUM_TOKENS = 32
NEAR_TIE = 1e-4
PROMPTS = ["The quick brown fox jumps over", "def add(a, b):", "a", "one two one two one two one two one"]

EXECUTORS = ["torch", "transformers", *(["native"] if native.availability().isa else [])]
WAYS = [(method, executor) for method in ("off", "ngram", "draft_model") for executor in EXECUTORS]
# The steps of "off" are among those of the others: tokens without guesses, guesses that are wrong and guesses that are right.
QUICK = [(method, executor) for method, executor in WAYS if method != "off" or executor == EXECUTORS[-1]]


@dataclass
class Checkpoint:
    """A model on disk and in transformers."""

    folder: Path
    model: Any
    said: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: list[int]) -> list[int]:
        """What transformers says behind a prompt, asked once for all ways of running the model."""
        if (key := tuple(prompt)) not in self.said:
            limits = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "pad_token_id": 0, "eos_token_id": None}
            self.said[key] = self.model.generate(torch.tensor([prompt]), do_sample=False, **limits)[0, len(prompt) :].tolist()
        return self.said[key]


# Two whose configs do not take these sizes, and two whose own code takes no keywords: only programs can run them.
_LEFT_OUT = {"cwm", "helium", "stablelm", "nemotron"}


@pytest.fixture(scope="module", params=slow_but(QUICK_FAMILIES, [family for family in FAMILIES if family not in _LEFT_OUT]))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = save_tokenizer(folder)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(tiny_config(request.param, **shape)).eval()
    model.save_pretrained(folder)
    return Checkpoint(folder, model)


@pytest.mark.parametrize("way", slow_but(QUICK, WAYS), ids="-".join)
def test_greedy_output_is_that_of_transformers(checkpoint: Checkpoint, way: tuple[str, str]) -> None:
    folder, (method, executor) = str(checkpoint.folder), way
    speculative = SpeculativeConfig((NgramConfig(4, 3, 1), DraftModelConfig(folder, 3, quantization="none")), adaptive=False)
    engine = boot(
        EngineConfig(
            ModelConfig(folder, executor=executor, dtype="float32"),
            CacheConfig(num_blocks=64, block_size=16 if executor == "native" else 4),
            SchedulerConfig(max_num_batched_tokens=12, max_num_seqs=4, max_draft_tokens_per_step=8),  # prompts come in chunks
            speculative,
        )
    )
    prompts = [engine.intake.encode(text) for text in PROMPTS]
    said: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, speculation={"method": method})
        engine.core.add_request(engine.intake.requests(str(i), prompt, params, 0.0)[0])
    while engine.core.has_work:
        for delta in engine.core.step(0.0):
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.core.check()

    for i, prompt in enumerate(prompts):
        expected = checkpoint.greedy(prompt)
        got = said[str(i)]
        if got != expected:
            first = next(k for k, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
            best = checkpoint.model(torch.tensor([prompt + expected[:first]])).logits[0, -1].topk(2).values
            assert best[0] - best[1] < NEAR_TIE, f"prompt {i} differs at token {first}: {got} != {expected}"
    if method == "draft_model":  # the target drafts for itself: every guess is right, but where it is undecided
        stats = engine.core.stats()
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens > 0
