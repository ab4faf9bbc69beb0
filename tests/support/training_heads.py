"""A tiny target on disk for heads in training: text to learn, a run over it, and the exported head in our own drafting code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from pretended_engine import TORCH, Guess, PretendedEngine, block_size, opened
from safetensors.torch import load_file
from target_views import a_view
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from foretoken.kernels.layout import Executor
from foretoken.kernels.program import Program
from foretoken.kernels.stored_tensors import read_tensors
from foretoken.kernels.weights import bind_program, load_program_executor
from foretoken.proposers import dflash
from foretoken.proposers.config import BlockConfig
from foretoken.proposers.detection import detect_method
from foretoken.proposers.loading import LoadedProposer, Resources
from foretoken.proposers.training.block_attention import Blocks
from foretoken.proposers.training.frozen import FrozenTarget
from foretoken.proposers.training.heads.base import Head
from foretoken.proposers.training.heads.dflash import DFlash
from foretoken.proposers.training.loop import Plan, Run, Trainee
from foretoken.proposers.training.optimizer import OptimizerSettings
from foretoken.proposers.training.packing import Document, Packed, PackedStream, write
from foretoken.proposers.training.schedule import Schedule

AnyHead = TypeVar("AnyHead", bound=Head)
VOCAB, HIDDEN, MAX_MODEL_LEN = 40, 64, 256


def llama_config(**settings: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": MAX_MODEL_LEN, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "initializer_range": 0.15, "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**sizes, **settings})


class TinyTarget:
    """A random model; as PretendedEngine's target it has its real states."""

    def __init__(self, folder: Path, model: PreTrainedModel | None = None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = model or LlamaForCausalLM(llama_config())
            for name, parameter in model.named_parameters():
                if "norm" in name:               # random too, so that none can be forgotten unnoticed
                    parameter.data += 0.3 * torch.randn_like(parameter)
                elif "o_proj" in name or "down_proj" in name:
                    parameter.data *= 0.3        # a state tells mostly of its own token, as far as few steps can learn from it
            model.save_pretrained(folder)
        self.folder = folder
        self.frozen = FrozenTarget.load(folder)

    def states(self, text: Sequence[int]) -> Tensor:
        """[n, HIDDEN] float32, behind the final norm."""
        return self.frozen(document(text)).last

    def state(self, text: Sequence[int], boundary: int) -> Tensor:
        assert boundary == -1, "behind the final norm"
        return self.states(text)[-1]

    @cached_property
    def resources(self) -> Resources:
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(self.folder)
        network = load_program_executor(read_tensors([self.folder / "model.safetensors"]), hf_config, TORCH)

        def bind(program: Program, weights: Mapping[str, Tensor], quantization: str | None) -> Executor:
            return bind_program(program, weights, TORCH, network.bank)

        embedding = "model.embed_tokens.weight"
        sizes = {"num_layers": hf_config.num_hidden_layers, "hidden_size": hf_config.hidden_size, "vocab_size": hf_config.vocab_size}
        head = embedding if hf_config.tie_word_embeddings else "lm_head.weight"
        view = a_view(folder=self.folder, config=hf_config.to_dict(), max_model_len=MAX_MODEL_LEN, head=head, **sizes)
        return Resources(view, lambda name, _: Path(name), bind, cast(Any, None))

    def guesses(self, loaded: LoadedProposer, prompts: Sequence[Sequence[int]], steps: int = 5) -> list[Guess]:
        """What the loaded proposer guesses step by step, while a random part of its guesses is accepted."""
        assert loaded.found and not any(line.startswith("unused") for line in loaded.found)
        generator = torch.Generator().manual_seed(2)
        engine = PretendedEngine(opened(loaded, TORCH), cast(Any, self), block_size(TORCH))
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt)

        def some(_: str, guess: Guess) -> tuple[Sequence[int], int]:
            count, token = torch.randint(VOCAB, (2,), generator=generator).tolist()
            return range(count % (1 + len(guess.tokens))), token

        found = [guess for _ in range(steps) for guess in engine.step(some, ceiling=10).values()]
        return [guess for guess in found if guess.tokens]


class Tapped(TinyTarget):
    """Three layers, and the states between them."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(5)
        super().__init__(folder, LlamaForCausalLM(llama_config(num_hidden_layers=3)))

    def state(self, text: Sequence[int], boundary: int) -> Tensor:
        return self.frozen(document(text), (boundary - 1,)).layers[boundary - 1][-1]


def made_once(kind: Callable[[Path], object]) -> Any:
    """A module's fixture: such a target in a folder of its own."""
    return pytest.fixture(scope="module")(lambda tmp_path_factory: kind(tmp_path_factory.mktemp("target")))


def check_export(head: DFlash, target: TinyTarget, folder: Path, scores: Callable[[Sequence[int], Sequence[int], int], Tensor]) -> None:
    """What is served from the folder guesses by scores(text, guesses so far, guesses wanted) [V]."""
    head.export(folder)
    assert detect_method(str(folder)) == "dflash"
    for count in (4, 2):
        config = BlockConfig(str(folder), "dflash", num_speculative_tokens=count, quantization="none")
        guesses = target.guesses(dflash.load(config, target.resources), texts(3, 9, seed=3))
        assert {len(guess.tokens) for guess in guesses} == {count}
        check_guesses(guesses, lambda text, path, count=count: scores(text, path, count), count)


def block_states(head: DFlash, text: Sequence[int], count: int) -> Tensor:
    """[count, HIDDEN]: what `count` guesses behind a text are made of, the whole text read again."""
    batch = document(text)
    block = Blocks(batch, torch.tensor([len(text) - 1]), torch.tensor([count + 1]), head.settings.causal)
    with torch.no_grad():
        return head(head.states(batch), block)[1:]


def exported(head: Head, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What an export holds: its tensors, and what config.json says."""
    head.export(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def document(tokens: Sequence[int]) -> Packed:
    """A batch of one text, all of it learned."""
    return documents(tokens)


def documents(*texts: Sequence[int]) -> Packed:
    tokens = torch.tensor([token for text in texts for token in text])
    return Packed(tokens, torch.ones(len(tokens), dtype=torch.bool), (0, *accumulate(map(len, texts))))


def check_gradients(head: Head, loss: Tensor, expected: Tensor) -> None:
    """Both losses change every parameter alike."""
    parameters = list(head.parameters())
    for one, other in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def check_documents_apart(head: Head) -> None:
    """Two documents in a batch lose what each loses by itself."""
    one, other = texts(2, 11, seed=6)
    both = head.loss(documents(one, other))
    alone = [head.loss(document(text)) for text in (one, other)]
    assert both.weight == pytest.approx(sum(losses.weight for losses in alone))
    assert float(both.total.detach()) == pytest.approx(sum(float(losses.total.detach()) for losses in alone), rel=1e-4)


def texts(count: int, length: int, seed: int, lag: int = 1) -> list[list[int]]:
    """Every token says which one comes `lag` places later; but one in eight comes from nowhere."""
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0)).tolist()
    random = np.random.default_rng(seed)
    found: list[list[int]] = []
    for _ in range(count):
        text: list[int] = []
        while len(text) < length:
            is_new = len(text) < lag or random.random() < 1 / 8
            text.append(int(random.integers(VOCAB)) if is_new else successor[text[-lag]])
        found.append(text)
    return found


class Unshifted(Packed):
    """Every later token one place too early: what a head sees if states stand beside their own tokens, not beside those they chose."""

    def ahead(self, distance: int) -> tuple[Tensor, Tensor]:
        return super().ahead(distance - 1)


class UnshiftedStream(PackedStream):
    def __getitem__(self, index: int) -> Packed:
        return Unshifted(**vars(super().__getitem__(index)))


def accuracy_with_and_without_shift(make: Callable[[], Head], folder: Path, lr: float) -> tuple[float, float]:
    """Of the first guess, after the same training.

    What comes next depends on the token before the last, which the state tells at once: whoever learned it beside another token
    looks in the wrong place.
    """
    right, wrong = with_and_without_shift(make, folder, lr, lag=2)
    return right.after["accuracy_1"], wrong.after["accuracy_1"]


def with_and_without_shift(make: Callable[[], Trainee], folder: Path, lr: float, lag: int = 1) -> list[Training]:
    runs: list[Training] = []
    for stream in (PackedStream, UnshiftedStream):
        torch.manual_seed(0)
        runs.append(Training(make(), folder / stream.__name__, lr, lag=lag, stream=stream))
    return runs


class Training:
    """A head over predictable text, and how well it does on text held out, which is always shifted rightly."""

    def __init__(
        self, head: Trainee, folder: Path, lr: float, steps: int = 40, lag: int = 1, stream: type[PackedStream] = PackedStream
    ) -> None:
        documents = [Document(np.array(text), np.array([0] * 5 + [1] * 35)) for text in texts(120, 40, 1, lag)]
        write(folder / "text", documents, VOCAB)
        plan = Plan(
            steps=steps, accumulate=1, workers=1, schedule=Schedule(warmup=0.1, decay=0.5, floor=0.1),
            optimizer=OptimizerSettings(lr=lr, table_lr=lr),
        )
        held_out = [document(text) for text in texts(10, 40, 2, lag)]
        self.run = Run(head, stream([folder / "text"], 400), plan, folder / "work", held_out)
        self.before = self.metrics()
        assert self.run.train(show=lambda line: None)
        self.after = self.metrics()

    def metrics(self) -> dict[str, float]:
        return {name.removeprefix("held_out_"): value for name, value in self.run.evaluate().items()}


def rounded(head: Head) -> None:
    """Give a head the weights that its export will have."""
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()


def disturbed(head: AnyHead, norms: float = 0.3, others: float = 0.1) -> AnyHead:
    """Every weight is random, so that none can be forgotten unnoticed."""
    for name, parameter in head.named_parameters():
        parameter.data += (norms if "norm" in name else others) * torch.randn_like(parameter)
    return head


def check_served(
    head: Head,
    target: TinyTarget,
    folder: Path,
    method: str,
    load: Callable[[Any, Resources], LoadedProposer],
    config: Callable[..., Any],
    scores: Callable[[Sequence[int], Sequence[int]], Tensor],
    count: int,
    **settings: Any,
) -> Sequence[str]:
    """What is served from the folder makes `count` guesses by scores(text, guesses so far) [V]. Returns what is told of it.
    settings: those of config, what `load` takes."""
    rounded(head)
    head.export(folder)
    assert detect_method(str(folder)) == method
    loaded = load(config(model=str(folder), quantization="none", **settings), target.resources)
    check_guesses(target.guesses(loaded, texts(3, 9, seed=3)), scores, count)
    return loaded.found


def check_guesses(guesses: Sequence[Guess], scores: Callable[[Sequence[int], Sequence[int]], Tensor], count: int) -> None:
    """scores: (text, the guesses before) -> logits, recomputed from the whole text. Every guess is the best by them."""
    assert len(guesses) >= 8 and max(len(guess.tokens) for guess in guesses) == count
    for guess in guesses:
        for place, (token, confidence) in enumerate(zip(guess.tokens, guess.confidence, strict=True)):
            with torch.no_grad():
                probs = scores(guess.text, guess.tokens[:place]).softmax(-1)
            assert token == int(probs.argmax())
            assert abs(float(probs[token]) - confidence) < 1e-3
