"""A token's logits are the same to the bit however it is computed: the property that makes speculation exact in any number format."""

import random
from typing import Any

import pytest
import torch
import transformers
from native_only import native_only
from native_ops import OF_PRECISIONS
from paged_batches import BLOCK_SIZE, Row, batch_of
from random_adapters import random_pairs, with_adapters
from variants import slow_but

from foretoken.kernels import native
from foretoken.kernels.adapters import AdapterBank, AdapterRoom
from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.execution import Execution
from foretoken.kernels.fuse import fuse
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.program import Program

pytestmark = [native_only, pytest.mark.usefixtures("two_threads")]

EXECUTIONS = {
    **OF_PRECISIONS,
    "int8 cache": Execution(torch.bfloat16, kv_cache="int8"),
    "float32, int8 weights": Execution(torch.float32, quantization="int8"),
}
Model = tuple[Program, dict[str, torch.Tensor]]
LENGTH = 300  # more than one segment of attention
VOCAB = 200
NUM_BLOCKS = 200


MODELS = ["qwen3", "window", "experts", "latent", "gpt_oss", "layer norms"]


@pytest.fixture(scope="module", params=slow_but(MODELS[:4], MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    sizes: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 112, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": VOCAB, "max_position_embeddings": 512}
    if request.param == "qwen3":
        config = transformers.Qwen3Config(**sizes, sliding_window=None)
    elif request.param == "experts":
        groups = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "first_k_dense_replace": 1}
        config = transformers.Glm4MoeConfig(**sizes, **groups, n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=48)
    elif request.param == "latent":
        sizes |= {"q_lora_rank": 40, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32}
        sizes |= {"num_key_value_heads": 6, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        config = transformers.DeepseekV3Config(**sizes, n_group=4, topk_group=2, first_k_dense_replace=1)
    elif request.param == "gpt_oss":
        config = transformers.GptOssConfig(**sizes, num_local_experts=6, num_experts_per_tok=2, sliding_window=100)
    elif request.param == "layer norms":
        config = transformers.Cohere2Config(**{name: size for name, size in sizes.items() if name != "head_dim"}, sliding_window=100)
    else:
        config = transformers.MistralConfig(**sizes, sliding_window=100)
    program = fuse(decoder_program(config))
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in program.weights.items()}
    return program, weights


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS.keys())
def test_any_arrangement_gives_the_same_bits(model: Model, execution: Execution) -> None:
    executor = NativeExecutor(*model, execution)
    rng = random.Random(5)
    texts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(3)]
    reference = [_one_by_one(executor, text) for text in texts]
    for trial in range(12):
        native.set_threads(rng.choice([1, 2, 3]))
        _compare(executor, texts, reference, random.Random(trial))


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS.keys())
def test_rows_have_the_same_bits_beside_rows_with_other_adapters(model: Model, execution: Execution) -> None:
    """Those without any have the bits of a network that knows of none."""
    program, weights = model
    bank = AdapterBank.of(program, AdapterRoom(num_slots=3, rank=7), execution.dtype)
    executor, plain = NativeExecutor(program, weights, execution, adapters=bank), NativeExecutor(program, weights, execution)
    bank.put(1, random_pairs(bank, 1))
    bank.put(3, random_pairs(bank, 3, rank=2, weights="mlp"))
    rng = random.Random(6)
    texts, slots = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(3)], (1, 0, 3)
    reference = [_one_by_one(executor if slot else plain, text, slot) for text, slot in zip(texts, slots, strict=True)]
    for trial in range(5):
        native.set_threads(rng.choice([1, 2, 3]))
        _compare(executor, texts, reference, random.Random(trial), slots)


def _one_by_one(executor: NativeExecutor, text: list[int], slot: int = 0) -> torch.Tensor:
    """Logits [LENGTH, V] of a text computed alone, one token a pass."""
    kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    blocks = list(range(-(-LENGTH // BLOCK_SIZE)))
    logits = []
    for i, token in enumerate(text):
        output = executor.run(with_adapters(batch_of([Row([token], i, blocks)]), slot), kv)
        assert output.logits is not None
        logits.append(output.logits[0])
        assert output.argmax[0] == output.logits[0].argmax() and output.top[0] == output.logits[0].max()
    return torch.stack(logits)


def _compare(
    executor: NativeExecutor,
    texts: list[list[int]],
    reference: list[torch.Tensor],
    rng: random.Random,
    slots: tuple[int, ...] = (0, 0, 0),
) -> None:
    """The texts in ragged steps of random lengths, together, in random blocks, with a random tree behind each step.

    One branch of the tree is the text itself: its tokens must have the text's logits; they are then thrown away.
    """
    kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    per_row = -(-LENGTH // BLOCK_SIZE) + 4  # the tree may stand past the text's end
    blocks = [order[r * per_row : (r + 1) * per_row] for r in range(len(texts))]
    done = [0] * len(texts)
    longest = rng.choice([3, 20, 70, LENGTH])
    while any(count < LENGTH for count in done):
        rows, branches = [], []
        for r, text in enumerate(texts):
            new = text[done[r] : done[r] + rng.randint(0 if rng.random() < 0.1 else 1, longest)]
            tree, branch = _random_tree(rng, text[done[r] + len(new) :]) if new and rng.random() < 0.6 else ([], [])
            rows.append(Row(new, done[r], blocks[r], tree))
            branches.append(branch)
        batch = with_adapters(batch_of(rows), *slots)
        output = executor.run(batch, kv)
        logits = output.logits
        if logits is None:
            continue
        for r, row in enumerate(rows):
            first = int(batch.query_start_loc[r])
            expected = reference[r][done[r] : done[r] + len(row.causal)]
            assert torch.equal(logits[first : first + len(row.causal)], expected)
            done[r] += len(row.causal)
            in_tree = logits[[first + len(row.causal) + node for node in branches[r]]]
            assert torch.equal(in_tree, reference[r][done[r] : done[r] + len(branches[r])])


def _random_tree(rng: random.Random, following: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """At most 40 nodes; and those among them that are the text's next tokens, in order."""
    tree: list[tuple[int, int]] = []
    branch: list[int] = []
    for _ in range(rng.randint(1, 40)):
        if rng.random() < 0.4 and len(branch) < len(following):
            tree.append((following[len(branch)], branch[-1] if branch else -1))
            branch.append(len(tree) - 1)
        else:
            tree.append((rng.randrange(VOCAB), rng.randint(-1, len(tree) - 1)))
    return tree, branch
