"""A device that is not the host, for machines that have none: its tensors are of device "meta" but have values.

Operations that would mix devices fail as they do on a GPU, and what is copied to the host, or waits for it, is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

from foretoken.kernels.layout import ChainOutput, Draws, Executor, ForwardOutput, HasNoStates, KVTensors, RaggedBatch, StateRoom
from foretoken.kernels.started import Started
from foretoken.kernels.torch_executor import Computed
from foretoken.proposers.base import Feedback, Proposer

THERE = torch.device("meta")
aten: Any = torch.ops.aten

# Copies between devices, and what takes indices from the host though it computes elsewhere.
_MAY_MIX = {
    *(aten._to_copy.default, aten.copy_.default),
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default),
}


class Remote(Tensor):
    """A tensor over there."""

    _values_there: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Remote:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=THERE
        )
        made._values_there = inner
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert _current, "a tensor of Elsewhere outside of it"
        return _current[-1].compute(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """Within it there is that device."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[int] = []  # numbers of each copy to the host
        self.to_device: list[int] = []
        self.calls: list[Any] = []  # operations there

    def __enter__(self) -> Elsewhere:
        _current.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _current.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        tree_map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (args, kwargs))
        remote = [x for x in tensors if isinstance(x, Remote)]
        asked = kwargs.get("device")
        if not remote and (asked is None or torch.device(asked) != THERE):
            return func(*args, **kwargs)
        if func not in _MAY_MIX and func._can_decompose():  # inference mode hands over what is made of other operations
            with self:
                return func.decompose(*args, **kwargs)
        assert func in _MAY_MIX or not remote or all(isinstance(x, Remote) or not x.dim() for x in tensors), f"{func} mixes devices"
        is_there = bool(remote) if asked is None else torch.device(asked) == THERE
        if func is aten.copy_.default:
            is_there = isinstance(args[0], Remote)
        if func is aten._local_scalar_dense.default or (remote and not is_there):
            self.to_host += [remote[-1].numel()] * bool(remote[-1].numel())
        elif is_there and len(remote) < len(tensors):
            self.to_device.append(sum(x.numel() for x in tensors if not isinstance(x, Remote)))
        self.calls.append(func)
        if asked is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        inner_args, inner_kwargs = tree_map(lambda x: x._values_there if isinstance(x, Remote) else x, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if func is aten._to_copy.default and out is inner_args[0]:
            out = out.clone()
        if not is_there:
            return out
        wrapped = tree_map(lambda x: Remote(x) if isinstance(x, Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if remote else wrapped


_current: list[Elsewhere] = []


def there(tensor: Tensor) -> Tensor:
    return Remote(tensor.detach().clone())


def here(tensor: Tensor) -> Tensor:
    """For tests: not counted."""
    return tensor._values_there if isinstance(tensor, Remote) else tensor


class FarExecutor(HasNoStates):
    """An executor over there, as a GPU's is: scores and states stay, and a pass need not be waited for."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.kv_layers, self.vocab_size, self.max_model_len = executor.kv_layers, executor.vocab_size, executor.max_model_len
        self.is_batch_invariant, self.weight_bytes, self.token_ids = executor.is_batch_invariant, executor.weight_bytes, executor.token_ids
        self.bank, self.recurrent = executor.bank, executor.recurrent

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> KVTensors:
        return self._executor.allocate(num_blocks, block_size, states)

    def kv_block_bytes(self, block_size: int) -> int:
        return self._executor.kv_block_bytes(block_size)

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        return self.start(batch, kv, hidden, inputs).finish()

    def start(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        hidden: tuple[int, ...] = (),
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Started:
        count = len(batch.logits_indices)
        moved = {f.name: here(value) for f in fields(batch) if isinstance(value := getattr(batch, f.name), Remote)}
        everything = replace(batch, **{**moved, "full_logits": torch.arange(count)})
        found = self._executor.run(everything, kv, hidden, {name: here(tensor) for name, tensor in (inputs or {}).items()})
        states: dict[int, Tensor] = {boundary: Remote(state) for boundary, state in found.hidden.items()}
        logits = None if found.logits is None else Remote(found.logits)
        return Started(Computed(Remote(found.argmax), Remote(found.top), logits, states), count, there(batch.full_logits))

    def run_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        draws: Draws | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainOutput:
        return self._executor.run_chain(batch, kv, counts, draws, {name: here(tensor) for name, tensor in (inputs or {}).items()})


def with_far_states(proposer: Proposer) -> Proposer:
    """The same proposer, told of a target whose states are over there."""
    observe = proposer.observe

    def told(feedback: Feedback) -> None:
        observe(replace(feedback, hidden={boundary: there(states) for boundary, states in feedback.hidden.items()}))

    proposer.observe = told  # type: ignore[method-assign]
    return proposer


def drafting(drafter: Any, prompts: Mapping[str, list[int]], choose: Callable[[], Any]) -> Callable[[bool], list[dict[str, Any]]]:
    """For `compare`: some steps of a drafter over these prompts, with states of the target here or there. choose: makes what accepts."""

    def play(is_far: bool) -> list[dict[str, Any]]:
        engine = drafter.run(num_speculative_tokens=4)
        if is_far:
            with_far_states(engine.proposer)
        for name, prompt in prompts.items():
            engine.add(name, prompt)
        accepts = choose()
        return [engine.step(accepts) for _ in range(8)]

    return play


def compare(play: Callable[[bool], Sequence[Mapping[str, Any]]], *modules: Any) -> Elsewhere:
    """Play it here, then with all networks that these modules bind over there. The guesses of each step must be the same; returns
    what was copied."""
    expected = play(False)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            bind: Any = module.bind_program
            patch.setattr(module, "bind_program", lambda *args, bind=bind: FarExecutor(bind(*args)))
        with Elsewhere() as device:
            found = play(True)
    for step, wanted in zip(found, expected, strict=True):
        assert step.keys() == wanted.keys()
        for name, guess in wanted.items():
            assert (step[name].tokens, step[name].parents) == (guess.tokens, guess.parents)
            assert step[name].confidence == pytest.approx(guess.confidence, abs=1e-6)
            torch.testing.assert_close(step[name].probs, guess.probs)
    assert sum(len(guess.tokens) for step in expected for guess in step.values()) > 40, "the test shows little"
    return device
