"""Weights that several networks share are prepared once, and names that mean something else to each are not confused."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from native_only import native_only
from paged_batches import Row, batch_of
from small_networks import EMBEDDING, HEAD, between_tables, random_weights
from torch import Tensor

from foretoken.kernels.execution import Execution, UnsupportedExecution
from foretoken.kernels.layout import Executor
from foretoken.kernels.native import NativeExecutor
from foretoken.kernels.ops import ArgMax, GatherRows, Linear, TopK
from foretoken.kernels.program import Program
from foretoken.kernels.stored_tensors import read_tensors
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.transformers_model import ATTENTION, TransformersExecutor
from foretoken.kernels.weight_bank import WeightBank
from foretoken.kernels.weights import bind_program, load_program_executor

WIDTH, VOCAB = 32, 96
BEST = ArgMax(("logits",), ("argmax", "top"))
EXECUTIONS = [
    pytest.param(Execution(torch.float32, prefer_native=False), id="torch"),
    pytest.param(Execution(torch.bfloat16, prefer_native=False), id="torch bfloat16"),
    pytest.param(Execution(torch.float32), id="native", marks=native_only),
    pytest.param(Execution(torch.bfloat16), id="native bfloat16", marks=native_only),
]


def a_drafter(*shared: str) -> Program:
    return between_tables(VOCAB, WIDTH, shared)


def logits_of(executor: Executor) -> Tensor:
    batch = batch_of([Row([3, 4, 5], 0, [0]), Row([6], 0, [1])])
    logits = executor.run(batch, executor.allocate(4, 16)).logits
    assert logits is not None
    return logits


class NoMatrices(Mapping[str, Tensor]):
    """Tensors of which only vectors may be read: whoever prepares a matrix again fails."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        assert self._tensors[name].dim() == 1, f"{name} is prepared a second time"
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_only_what_is_shared_is_taken_from_the_bank(execution: Execution) -> None:
    """Two drafters call different matrices "fc.weight"; one has an embedding and a head of its own."""
    target = bind_program(a_drafter(), target_weights := random_weights(a_drafter(), 0), execution)
    sharing, own = a_drafter(EMBEDDING, HEAD), random_weights(a_drafter(), 1)
    without = {name: own[name] for name in ("fc.weight", "norm.weight")}
    for program, given, means in ((sharing, without, target_weights | without), (a_drafter(), own, own)):
        executor = bind_program(program, given, execution, target.bank)
        assert type(executor) is type(target) and executor.bank is target.bank
        torch.testing.assert_close(logits_of(executor), logits_of(bind_program(a_drafter(), means, execution)), rtol=0, atol=0)
    with pytest.raises(KeyError):
        bind_program(sharing, without, execution)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_networks_of_one_checkpoint_keep_common_layers_once(execution: Execution, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=32
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    files = [tmp_path / "model.safetensors"]
    target = load_program_executor(read_tensors(files), config, execution)
    config.num_hidden_layers = 2
    draft = load_program_executor(read_tensors(files), config, execution, bank=target.bank)
    assert len(draft.kv_layers) == 2

    assert isinstance(draft, NativeExecutor | TorchExecutor)
    again = replace(draft.program, shared=frozenset(draft.program.weights))
    tensors = {name: torch.ones(shape) for name, shape in again.weights.items()}
    bind_program(again, NoMatrices(tensors), execution, target.bank)  # everything is there already
    with pytest.raises(AssertionError, match="a second time"):
        bind_program(again, NoMatrices(tensors), execution, WeightBank())

    short = transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config).eval()
    with torch.no_grad():
        expected = short(torch.tensor([[5, 6, 7, 8]])).logits[0]
    output = draft.run(batch_of([Row([5, 6, 7, 8], 0, [0])]), draft.allocate(2, 16)).logits
    assert output is not None
    exact = execution.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=1e-4 if exact else 0.05, atol=1e-4 if exact else 0.05)


@native_only
def test_another_format_is_packed_beside_the_first() -> None:
    """A quantised draft of the target's own files has narrow matrices; the embedding's rows it has in common."""
    program, exact = a_drafter(), Execution(torch.bfloat16)
    weights = random_weights(program, 0)
    target = bind_program(program, weights, exact)
    everything = replace(program, shared=frozenset(program.weights))
    narrow = bind_program(everything, weights, Execution(torch.bfloat16, quantization="int8"), target.bank)
    alone = bind_program(program, weights, Execution(torch.bfloat16, quantization="int8"))
    assert torch.equal(logits_of(narrow), logits_of(alone)) and not torch.equal(logits_of(narrow), logits_of(target))
    # Without tensors of its own it takes what there is: the exact format.
    own = {name: weights[name] for name in ("fc.weight", "norm.weight")}
    mixed = bind_program(a_drafter(EMBEDDING, HEAD), own, Execution(torch.bfloat16, quantization="int8"), target.bank)
    half = NativeExecutor(replace(program, shared=frozenset()), weights, exact)
    assert 0 < (logits_of(mixed) - logits_of(half)).norm() < 0.05 * logits_of(half).norm()


@native_only
def test_biases_belong_to_what_is_packed() -> None:
    """One matrix in two products, with a bias and without."""
    weights = {"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH), "head": torch.randn(VOCAB, WIDTH)}
    ops = (
        Linear(("x",), ("y",), ("w",), ("b",)), Linear(("y",), ("z",), ("w",)), GatherRows(("z",), ("rows",)),
        Linear(("rows",), ("logits",), ("head",)), BEST,
    )
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    program = Program(ops, shapes, (), {}, VOCAB, 64, ("z",), "", "logits", BEST, {"x": WIDTH})
    x = torch.randn(2, WIDTH)
    executor = bind_program(program, weights, Execution(torch.float32))
    assert isinstance(executor, NativeExecutor)
    output = executor.run(batch_of([Row([0, 0], 0, [0])]), executor.allocate(1, 16), (0,), {"x": x})
    torch.testing.assert_close(output.hidden[0], (x @ weights["w"].T + weights["b"]) @ weights["w"].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_lends_its_embedding_and_head(tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    target = TransformersExecutor(model)
    own = {name: tensor for name, tensor in random_weights(a_drafter(), 1).items() if name in ("fc.weight", "norm.weight")}
    program = a_drafter(EMBEDDING, HEAD)
    executor = bind_program(program, own, Execution(torch.float32), target.bank)
    assert isinstance(executor, TorchExecutor | NativeExecutor)
    head = model.get_output_embeddings().weight.detach()
    alone = {EMBEDDING: model.get_input_embeddings().weight.detach(), HEAD: head, **own}
    expected = logits_of(TorchExecutor(a_drafter(), alone, torch.float32))
    torch.testing.assert_close(logits_of(executor), expected, rtol=1e-4, atol=1e-5)


@native_only
def test_what_no_executor_can_share_is_refused() -> None:
    target = bind_program(a_drafter(), random_weights(a_drafter(), 0), Execution(torch.float32))
    program = a_drafter(EMBEDDING, HEAD)
    twice = replace(program, ops=(*program.ops, TopK(("logits",), ("columns", "values"), 2)))  # the native executor does not run it
    own = {name: tensor for name, tensor in random_weights(a_drafter(), 1).items() if name in ("fc.weight", "norm.weight")}
    with pytest.raises(UnsupportedExecution, match="cannot use what the native one has packed"):
        bind_program(twice, own, Execution(torch.float32), target.bank)
    assert isinstance(bind_program(twice, random_weights(twice, 1), Execution(torch.float32), target.bank), TorchExecutor)
