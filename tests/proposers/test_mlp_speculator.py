"""IBM's MLP speculator in the published layout, compared with the formula written out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import last_state_runs
import pytest
import torch
from elsewhere import compare, with_far_states
from fixed_k import fixed
from last_state_runs import VOCAB, WIDTH, opened, resources, save, state_of
from mlp_speculator_runs import guesses_of, is_drawn_as_the_target_would, load, started
from pretended_engine import EXECUTIONS, Guess
from torch import Tensor
from torch.nn.functional import gelu

from foretoken import LLM, SamplingParams
from foretoken.kernels import noise
from foretoken.kernels.execution import Execution
from foretoken.proposers import mlp_speculator
from foretoken.proposers.config import MlpSpeculatorConfig
from foretoken.proposers.config_entry import SpeculativeConfigError

POSITIONS, INNER = 4, 40


@dataclass(frozen=True)
class Published:
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def steps(self, state: Tensor, tokens: list[int]) -> list[Tensor]:
        """Logits [VOCAB] of each position; tokens: the last known token and the guesses."""
        n, d = self.config["n_predict"], self.config["inner_dim"] or self.config["emb_dim"]
        state_weight = 0.5 ** (0.5 / n)
        embedding_weight = math.sqrt((1 - state_weight**2) * (d / 2))
        s = state.double()
        if self.config["scale_input"]:
            s = s * torch.rsqrt(s.square().mean() + 1e-6) / math.sqrt(2)
        found = []
        for i, token in enumerate(tokens):
            emb, proj, head, weight, bias = (
                self.tensors[f"speculator.{part}".format(i)].double()
                for part in ("emb.{}.weight", "proj.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
            )
            s = proj @ s + (embedding_weight / state_weight) * emb[token]
            s = gelu(s * torch.rsqrt(s.square().mean() + 1e-6) * weight + bias, approximate="none")
            found.append((head @ s).float())
        return found


def _published(tied: bool = False, scaled: bool = False, inner: int = INNER, n: int = POSITIONS) -> Published:
    torch.manual_seed(11)
    d = inner or WIDTH
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": VOCAB,
        "emb_dim": WIDTH,
        "inner_dim": inner,
        "n_predict": n,
        "top_k_tokens_per_head": [4] * n,
        "n_candidates": 5,
        "tie_weights": tied,
        "scale_input": scaled,
    }
    tensors: dict[str, Tensor] = {}
    for i in range(n):
        fresh = {
            "emb.{}.weight": torch.randn(VOCAB, d) / 2,
            "ln.{}.weight": 1 + torch.rand(d),
            "ln.{}.bias": torch.randn(d) / 2,
            "head.{}.weight": torch.randn(VOCAB, d) / d**0.5,
        }
        for part, tensor in fresh.items():
            name = f"speculator.{part}"
            tensors[name.format(i)] = tensors[name.format(i - 1)].clone() if tied and i else tensor
        width = WIDTH if i == 0 else d
        proj = torch.randn(d, width) / width**0.5
        tensors[f"speculator.proj.{i}.weight"] = tensors["speculator.proj.1.weight"].clone() if tied and i > 1 else proj
    return Published(config, tensors)


PUBLISHED = {
    "untied": _published(),
    "tied": _published(tied=True),
    "tied, scaled": _published(tied=True, scaled=True),
    "inner_dim 0": _published(scaled=True, inner=0),
    "one position": _published(tied=True, n=1),
}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", PUBLISHED)
def test_chains_are_the_best_tokens_of_the_formula(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    loaded = load(tmp_path, published, execution)
    n = published.config["n_predict"]
    assert loaded.found[0].startswith(f"{n} of {n} positions") and len(loaded.found) == 1
    guesses = guesses_of(started(loaded))
    assert len(guesses) > 25 and max(len(guess.tokens) for _, guess in guesses) == n
    for _, guess in guesses:
        assert guess.parents == list(range(-1, len(guess.tokens) - 1))
        expected = published.steps(state_of(guess.text[:-1]), [guess.text[-1], *guess.tokens[:-1]])
        for token, confidence, logits in zip(guess.tokens, guess.confidence, expected, strict=True):
            assert token == int(logits.argmax())
            assert confidence == pytest.approx(float(torch.softmax(logits, -1)[token]), abs=1e-5)


@pytest.mark.parametrize("layout", ["tied, scaled", "untied"])
def test_scores_and_states_are_the_formulas_number_by_number(layout: str, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    proposer: Any = load(tmp_path, published).open(opened())
    state, tokens = torch.randn(WIDTH), [3, 1, 4, 1]
    recurrence = proposer._heads._recurrence
    carried = recurrence.begin(state[None])
    for step, (token, expected) in enumerate(zip(tokens, published.steps(state, tokens), strict=True)):
        scores, carried = recurrence.step(step, carried, [token])
        torch.testing.assert_close(scores[0], expected, rtol=1e-5, atol=1e-5)


def test_rows_that_sample_draw_under_the_targets_own_noise(tmp_path: Path) -> None:
    published = PUBLISHED["untied"]
    run = started(load(tmp_path, published, draft_sample_method="probabilistic"), (0.0, 1.0, 0.7))
    differing = 0
    for name, guess in guesses_of(run):
        expected = published.steps(state_of(guess.text[:-1]), [guess.text[-1], *guess.tokens[:-1]])
        for j, (token, logits) in enumerate(zip(guess.tokens, expected, strict=True)):
            assert is_drawn_as_the_target_would(guess, run.texts[name].draw, j, logits)
            differing += token != int(logits.argmax())
    assert differing > 5


def test_p_q_rules_get_the_distributions_that_tokens_were_drawn_from(tmp_path: Path) -> None:
    published = PUBLISHED["tied"]
    run = started(load(tmp_path, published, draft_sample_method="probabilistic"), (0.0, 1.0, 0.7), return_probs=True)
    for name, guess in guesses_of(run):
        draw = run.texts[name].draw
        expected = published.steps(state_of(guess.text[:-1]), [guess.text[-1], *guess.tokens[:-1]])
        assert guess.probs is not None and guess.probs.shape == (len(guess.tokens), VOCAB)
        for j, (token, probs, logits) in enumerate(zip(guess.tokens, guess.probs, expected, strict=True)):
            if draw.temperature:
                torch.testing.assert_close(probs, torch.softmax(logits / draw.temperature, -1), rtol=1e-4, atol=1e-5)
                key = noise.keys([noise.step_stream(draw.seed, draw.choice, len(guess.text), noise.Purpose.DRAFT)], [len(guess.text) + j])
                assert token == int(noise.sample(probs.log()[None], key)[0]) or noise.margin(probs.log()[None], key)[0] < 1e-3
            else:
                assert probs[token] == 1.0 and probs.sum() == 1.0


def test_the_batch_does_not_matter(tmp_path: Path) -> None:
    loaded = load(tmp_path, PUBLISHED["tied"], draft_sample_method="probabilistic")
    runs = [started(loaded, (0.0, 1.0, 0.7)) for _ in range(3)]
    for run in runs:
        run.step({})
        run.step({})
    ceilings = {"r0": 4, "r1": 1, "r2": 3}
    whole, reverse = runs[0].step(ceilings), runs[1].step(ceilings, order=["r2", "r1", "r0"])
    assert {name: guess.tokens for name, guess in whole.items()} == {name: guess.tokens for name, guess in reverse.items()}
    assert [len(whole[name].tokens) for name in ceilings] == [4, 1, 3]
    assert runs[2].step({"r2": 3})["r2"].tokens == whole["r2"].tokens


def test_tied_weights_are_kept_once_in_memory_and_may_be_kept_once_in_the_file(tmp_path: Path) -> None:
    published = PUBLISHED["tied"]
    once = {n: t for n, t in published.tensors.items() if not any(f".{i}." in n for i in (2, 3)) and n not in _copies_of_first()}
    assert len(once) == 6
    saved = save(tmp_path / "once", published.config, once)
    whole, small = resources(tmp_path), resources(tmp_path)
    run = started(mlp_speculator.load(MlpSpeculatorConfig(str(saved)), small))
    again = started(load(tmp_path, published))
    assert [guess.tokens for _, guess in guesses_of(run)] == [guess.tokens for _, guess in guesses_of(again)]
    bound: list[int] = []

    def bind(program: Any, weights: Any, quantization: Any) -> Any:
        executor = whole.bind(program, weights, quantization)
        bound.append(sum(len(forms) for forms in executor.bank._entries.values()))
        return executor

    mlp_speculator.load(MlpSpeculatorConfig(str(saved)), replace(whole, bind=bind))
    assert bound[0] < bound[1] == bound[2] == bound[3], "positions 2 and 3 bring nothing new, position 1 a projection"


def _copies_of_first() -> set[str]:
    return {f"speculator.{part.replace('.', '.1.')}" for part in ("emb.weight", "ln.weight", "ln.bias", "head.weight")}


@pytest.mark.parametrize(
    ("change", "without", "settings", "message"),
    [
        ({"emb_dim": 32}, "", {}, "trained for states of width 32, the target has 24"),
        ({"vocab_size": 60}, "", {}, "trained for a vocabulary of 60, the target has 50"),
        ({"inner_dim": 48}, "", {}, r"'speculator\.emb\.0\.weight' .* is 50 x 40, but 50 x 48 is needed"),
        ({"n_predict": "4"}, "", {}, "'n_predict' must be an integer"),
        ({"n_predict": 0}, "", {}, "'n_predict' must be from 1 to 64"),
        ({}, "speculator.head.3.weight", {}, r"no tensor 'speculator\.head\.3\.weight'"),
        ({}, "speculator.proj.0.weight", {}, "is no MLP speculator"),
        ({}, "", {"num_speculative_tokens": 5}, r"'num_speculative_tokens' is 5, .* trained for 4"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], without: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    untied = PUBLISHED["untied"]
    changed = Published({**untied.config, **change}, {name: t for name, t in untied.tensors.items() if name != without})
    with pytest.raises(SpeculativeConfigError, match=message):
        load(tmp_path, changed, **settings)


def test_fewer_positions_keep_the_constants_of_all(tmp_path: Path) -> None:
    published = PUBLISHED["untied"]
    loaded = load(tmp_path, published, num_speculative_tokens=2)
    assert loaded.found == ("2 of 4 positions, state of width 40",)
    for _, guess in guesses_of(started(loaded)):
        assert len(guess.tokens) <= 2
        expected = published.steps(state_of(guess.text[:-1]), [guess.text[-1], *guess.tokens[:-1]])
        assert guess.confidence == pytest.approx([float(torch.softmax(logits, -1).max()) for logits in expected], abs=1e-5)


@pytest.mark.parametrize("executor", ["torch", pytest.param("native", marks=EXECUTIONS[1].marks)])
@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_an_engine_says_the_same_with_and_without(executor: str, sampling: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_cache_gb": 0.1, "executor": executor, "dtype": "float32" if executor == "torch" else "bfloat16"}
    prompts = ["one two three one two three one two", "Hello! How are you", "ha ha ha ha ha ha"]
    params = [SamplingParams(max_tokens=16, seed=i, temperature=t, ignore_eos=True) for i, t in enumerate((0.0, 0.9, 0.7))]
    said = []
    with LLM(speculative_config={"method": "off"}, **options) as llm:
        said.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        model = llm._running().model
    width, vocab_size = model.hf_config.hidden_size, model.vocab_size
    torch.manual_seed(0)
    tensors = {"speculator.proj.0.weight": torch.randn(32, width), "speculator.proj.1.weight": torch.randn(32, 32)}
    tensors |= {f"speculator.{part}.0.weight": torch.randn(vocab_size, 32) for part in ("emb", "head")}
    tensors |= {f"speculator.ln.0.{part}": torch.randn(32) for part in ("weight", "bias")}
    sizes = {"emb_dim": width, "inner_dim": 32, "vocab_size": vocab_size, "n_predict": 3, "tie_weights": True}
    save(tmp_path, {"model_type": "mlp_speculator", **sizes}, tensors)
    speculative = {"method": "mlp_speculator", "model": str(tmp_path), "draft_sample_method": sampling}
    with LLM(speculative_config=fixed(speculative), **options) as llm:
        said.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        health = {p.name: p for p in llm._running().core.proposers.stats()}["mlp_speculator"]
        assert health.num_failures == 0 and health.draft_seconds > 0
    assert said[1] == said[0]


@pytest.mark.parametrize(("drawn", "return_probs"), [(False, False), (True, False), (True, True)])
def test_only_what_is_guessed_comes_from_a_device(drawn: bool, return_probs: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"draft_sample_method": "probabilistic"} if drawn else {}

    def play(is_far: bool) -> list[dict[str, Guess]]:
        run = started(load(tmp_path / str(is_far), PUBLISHED["tied, scaled"], **settings), (0.0, 1.0, 2.0), return_probs)
        if is_far:
            with_far_states(run.proposer)
        return [run.step({f"r{i}": 1 + (step + i) % 5 for i in range(3)}) for step in range(12)]

    copied = compare(play, last_state_runs).to_host
    assert max(copied) < VOCAB or return_probs, "scores came to the host"
