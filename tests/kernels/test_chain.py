from dataclasses import replace

import pytest
import torch
import transformers
from decoding import BLOCK_SIZE, ragged
from torch import Tensor

from foretoken.kernels import noise
from foretoken.kernels.chain import run_chain_by_steps
from foretoken.kernels.layout import Draws, RaggedBatch
from foretoken.kernels.torch_kv import TorchKV
from foretoken.kernels.transformers_model import TransformersExecutor


@pytest.fixture(scope="module")
def executor() -> TransformersExecutor:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.3,
    )
    return TransformersExecutor(transformers.AutoModelForCausalLM.from_config(config))


PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [20]]


def prompts_batch(sampled: list[int]) -> RaggedBatch:
    """All prompts from the start, with a chain behind each of the sampled rows; four blocks a row."""
    batch = ragged([(prompt, 0, [15 - 4 * row - place for place in range(4)]) for row, prompt in enumerate(PROMPTS)], all_logits=False)
    return replace(batch, logits_indices=batch.logits_indices[sampled], full_logits=torch.arange(0))


def logits_by_hand(executor: TransformersExecutor, tokens: list[int]) -> Tensor:
    """[V], behind the last of these tokens: a plain forward over everything."""
    model = executor._model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    model.set_attn_implementation("foretoken_paged")
    return logits


def by_hand(executor: TransformersExecutor, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
    """The best token again and again, and its probability."""
    chosen: list[int] = []
    probabilities: list[float] = []
    for _ in range(count):
        probs = logits_by_hand(executor, tokens + chosen).softmax(-1)
        chosen.append(int(probs.argmax()))
        probabilities.append(float(probs.max()))
    return chosen, probabilities


@pytest.mark.parametrize(
    ("sampled", "counts"), [([0, 1, 2, 3], [5, 5, 5, 5]), ([0, 2, 3], [1, 6, 3]), ([1], [1]), ([], []), ([3, 0], [2, 4])]
)
def test_greedy_chains(executor: TransformersExecutor, sampled: list[int], counts: list[int]):
    kv = executor.allocate(16, BLOCK_SIZE)
    out = run_chain_by_steps(executor, prompts_batch(sampled), kv, torch.tensor(counts, dtype=torch.int64))
    assert out.logits is None
    assert out.token_ids.shape == out.confidence.shape == (len(sampled), max(counts, default=0))
    for chain, (row, count) in enumerate(zip(sampled, counts, strict=True)):
        tokens, probabilities = by_hand(executor, PROMPTS[row], count)
        assert out.token_ids[chain, :count].tolist() == tokens
        assert out.confidence[chain, :count].tolist() == pytest.approx(probabilities, rel=1e-4)


def test_chains_may_be_drawn_by_chance(executor: TransformersExecutor):
    sampled, counts = [0, 1, 3], [4, 1, 2]
    streams = [noise.stream(seed, 0) for seed in (5, 6, 7)]
    draws = Draws(torch.tensor([0.7, 0.0, 1.5]), torch.tensor(streams), torch.tensor([10, 20, 30]), vocab_size=60, keep_logits=True)
    out = executor.run_chain(prompts_batch(sampled), executor.allocate(16, BLOCK_SIZE), torch.tensor(counts), draws)
    assert out.logits is not None and out.logits.shape == (3, 4, 64)
    for chain, (row, count) in enumerate(zip(sampled, counts, strict=True)):
        text = list(PROMPTS[row])
        for step in range(count):
            logits = logits_by_hand(executor, text)
            scores, temperature = logits[None, :60], float(draws.temperatures[chain])
            key = noise.keys([streams[chain]], [int(draws.positions[chain]) + step])
            token = int(noise.sample(scores / temperature, key) if temperature else scores.argmax(-1))
            assert int(out.token_ids[chain, step]) == token
            assert float(out.confidence[chain, step]) == pytest.approx(float(scores.softmax(-1)[0, token]), rel=1e-4)
            torch.testing.assert_close(out.logits[chain, step], logits, rtol=1e-4, atol=1e-5)
            text.append(token)


def test_only_the_fed_tokens_are_written(executor: TransformersExecutor):
    kv = executor.allocate(16, BLOCK_SIZE)
    assert isinstance(kv, TorchKV)
    kv.k[0].fill_(7.0)
    run_chain_by_steps(executor, prompts_batch([0, 1]), kv, torch.tensor([4, 1]))
    written = (kv.k[0] != 7.0).flatten(1).any(1).view(16, BLOCK_SIZE)
    tables = prompts_batch([0]).block_tables.long()
    per_row = [int(written[tables[row]].sum()) for row in range(len(PROMPTS))]
    assert per_row == [5 + 3, 2, 3, 1]
