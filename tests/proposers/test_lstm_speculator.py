"""Arctic's speculators, with a cell (sum_lstm) and without (sum_rnn), as they are published, compared with the formula written out."""

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

from foretoken import LLM, SamplingParams
from foretoken.kernels.execution import Execution
from foretoken.proposers import mlp_speculator
from foretoken.proposers.config import MlpSpeculatorConfig
from foretoken.proposers.config_entry import SpeculativeConfigError

POSITIONS, INNER = 4, 40
GATES = ("input", "forget", "cell", "output")


@dataclass(frozen=True)
class Published:
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def steps(self, state: Tensor, tokens: list[int]) -> list[Tensor]:
        """Logits [VOCAB] of each position; tokens: the last known token and the guesses."""
        n, width = self.config["n_predict"], int(self.config["emb_dim"])
        share = 0.5 ** (1 / n)  # of the state's variance that a step keeps
        weight_of_embedding = math.sqrt((1 - share) * width / 2) / math.sqrt(share)
        h = state.double()
        if self.config["scale_input"]:
            h = _normed(h) / math.sqrt(2)
        memory = torch.zeros(int(self.config["inner_dim"]), dtype=torch.float64)
        found: list[Tensor] = []
        for i, token in enumerate(tokens):
            own, after_first = (0, min(i, 1)) if self.config["tie_weights"] else (i, i)

            def added(gate: str, h: Tensor = h, token: int = token, table: int = own, matrix: int = after_first) -> Tensor:
                middle = ".0" if not gate else ""  # without gates, modules are sequences of one layer
                embedding = self._tensor(f"{gate}emb.{table}{middle}.weight")[token]
                return h @ self._tensor(f"{gate}proj.{matrix}{middle}.weight").T + embedding * weight_of_embedding

            if self.config["method"] == "sum_rnn":
                h = _gelu(self._norm(f"ln.{own}.0", added("")))
            else:
                opened = {gate: 1 / (1 + torch.exp(-added(f"{gate}_"))) for gate in GATES if gate != "cell"}
                fresh = _gelu(self._norm(f"cell_ln.{own}", added("cell_")))
                memory = opened["forget"] * memory + opened["input"] * fresh
                h = opened["output"] * _gelu(self._norm(f"state_ln.{own}", memory))
            found.append((self._tensor(f"head.{i}.weight") @ h).float())
        return found

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return _normed(x) * self._tensor(f"{name}.weight") + self._tensor(f"{name}.bias")


def _normed(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6)


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _published(
    method: str,
    tied: bool = True,
    tied_embeddings: bool = False,
    scaled: bool = False,
    inner: int = INNER,
    n: int = POSITIONS,
    width: int = WIDTH,
    vocab: int = VOCAB,
) -> Published:
    """As Arctic's training writes it: of a tensor that several modules share, all copies but those of tied positions."""
    torch.manual_seed(13)
    config = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "base_model_name_or_path": "target",
        "model_type": "mlp_speculator",
        "input_hidden_dim": width,
        "inner_dim": str(inner),
        "proj_dim": str(inner),
        "emb_dim": str(inner),
        "vocab_size": vocab,
        "n_candidates": n,
        "n_predict": n,
        "top_k_tokens_per_head": [1] * n,
        "tie_weights": tied,
        "tie_lstm_embs": tied_embeddings,
        "scale_input": scaled,
        "method": method,
    }
    is_lstm = method == "sum_lstm"
    middle, copies = "" if is_lstm else ".0", 1 if tied else n
    tensors: dict[str, Tensor] = {}
    table = torch.randn(vocab, inner) / 2
    for gate in [f"{gate}_" for gate in GATES] if is_lstm else [""]:
        for i in range(copies):
            tensors[f"{gate}emb.{i}{middle}.weight"] = table.clone() if tied_embeddings else torch.randn(vocab, inner) / 2
        for i in range(min(n, 2) if tied else n):
            columns = inner if i else width
            tensors[f"{gate}proj.{i}{middle}.weight"] = torch.randn(inner, columns) / columns**0.5
    for norm in ("cell_ln", "state_ln") if is_lstm else ("ln",):
        for i in range(copies):
            tensors[f"{norm}.{i}{middle}.weight"] = 1 + torch.rand(inner)
            tensors[f"{norm}.{i}{middle}.bias"] = torch.randn(inner) / 2
    for i in range(n):
        head = torch.randn(vocab, inner) / inner**0.5
        tensors[f"head.{i}.weight"] = tensors["head.0.weight"].clone() if tied and i else head
    return Published(config, tensors)


PUBLISHED = {
    "lstm": _published("sum_lstm"),
    "lstm, tied embeddings, scaled": _published("sum_lstm", tied_embeddings=True, scaled=True),
    "lstm, tied embeddings, wide": _published("sum_lstm", tied_embeddings=True, inner=WIDTH),
    "lstm, one position": _published("sum_lstm", scaled=True, n=1),
    "rnn": _published("sum_rnn", tied=False),
    "rnn, scaled": _published("sum_rnn", tied=False, scaled=True),
    "rnn, tied": _published("sum_rnn"),
    "rnn, tied, scaled": _published("sum_rnn", scaled=True, inner=WIDTH),
}


def _expected(published: Published, guess: Guess) -> list[Tensor]:
    return published.steps(state_of(guess.text[:-1]), [guess.text[-1], *guess.tokens[:-1]])


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", PUBLISHED)
def test_chains_are_the_best_tokens_of_the_formula(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    loaded = load(tmp_path, published, execution)
    n = published.config["n_predict"]
    assert loaded.found[0].startswith(f"{n} of {n} positions") and len(loaded.found) == 1, "all tensors are known"
    guesses = guesses_of(started(loaded))
    assert len(guesses) > 25 and {len(guess.tokens) for _, guess in guesses} == set(range(1, n + 1))
    for _, guess in guesses:
        assert guess.parents == list(range(-1, len(guess.tokens) - 1))
        for token, confidence, logits in zip(guess.tokens, guess.confidence, _expected(published, guess), strict=True):
            assert token == int(logits.argmax())
            assert confidence == pytest.approx(float(torch.softmax(logits, -1)[token]), abs=1e-5)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", PUBLISHED)
def test_scores_are_the_formulas_number_by_number(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    recurrence: Any = load(tmp_path, published, execution).open(opened())._heads._recurrence  # type: ignore[attr-defined]
    states, tokens = torch.randn(2, WIDTH), [[3, 7], [1, 0], [4, VOCAB - 1], [1, 1]][: published.config["n_predict"]]
    expected = [published.steps(state, [row[i] for row in tokens]) for i, state in enumerate(states)]
    carried = recurrence.begin(states)
    for step, row in enumerate(tokens):
        scores, carried = recurrence.step(step, carried, row)
        torch.testing.assert_close(scores, torch.stack([logits[step] for logits in expected]), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["lstm", "rnn, tied"])
def test_rows_that_sample_draw_under_the_targets_own_noise(layout: str, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    run = started(load(tmp_path, published, draft_sample_method="probabilistic"), (0.0, 1.0, 0.7))
    differing = 0
    for name, guess in guesses_of(run):
        for j, (token, logits) in enumerate(zip(guess.tokens, _expected(published, guess), strict=True)):
            assert is_drawn_as_the_target_would(guess, run.texts[name].draw, j, logits)
            differing += token != int(logits.argmax())
    assert differing > 5


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", ["lstm, tied embeddings, scaled", "rnn"])
def test_p_q_rules_get_the_distributions_that_tokens_were_drawn_from(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    loaded = load(tmp_path, published, execution, draft_sample_method="probabilistic")
    run = started(loaded, (0.0, 1.0, 0.7), return_probs=True)
    for name, guess in guesses_of(run):
        temperature = run.texts[name].draw.temperature
        assert guess.probs is not None and guess.probs.shape == (len(guess.tokens), VOCAB)
        for token, probs, logits in zip(guess.tokens, guess.probs, _expected(published, guess), strict=True):
            if temperature:
                torch.testing.assert_close(probs, torch.softmax(logits / temperature, -1), rtol=1e-4, atol=1e-5)
            else:
                assert probs[token] == 1.0 and probs.sum() == 1.0


def test_the_batch_does_not_matter(tmp_path: Path) -> None:
    """A row that drops out takes its cell along."""
    loaded = load(tmp_path, PUBLISHED["lstm"], draft_sample_method="probabilistic")
    runs = [started(loaded, (0.0, 1.0, 0.7)) for _ in range(3)]
    for run in runs:
        run.step({})
        run.step({})
    ceilings = {"r0": 1, "r1": 4, "r2": 3}
    whole, reverse = runs[0].step(ceilings), runs[1].step(ceilings, order=["r2", "r1", "r0"])
    assert {name: guess.tokens for name, guess in whole.items()} == {name: guess.tokens for name, guess in reverse.items()}
    assert [len(whole[name].tokens) for name in ceilings] == [1, 4, 3]
    assert runs[2].step({"r2": 3})["r2"].tokens == whole["r2"].tokens


@pytest.mark.parametrize("layout", ["lstm", "rnn"])
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_positions_keep_the_constants_of_all(layout: str, count: int, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    loaded = load(tmp_path, published, num_speculative_tokens=count)
    assert len(loaded.found) == 1 and loaded.found[0].startswith(f"{count} of 4 positions")
    for _, guess in guesses_of(started(loaded)):
        assert len(guess.tokens) <= count
        assert guess.confidence == pytest.approx([float(torch.softmax(x, -1).max()) for x in _expected(published, guess)], abs=1e-5)


@pytest.mark.parametrize("held", GATES)
@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_tied_tensors_may_be_kept_once_in_the_file_under_any_of_their_names(held: str, prefix: str, tmp_path: Path) -> None:
    published = PUBLISHED["lstm, tied embeddings, scaled"]
    gone = {f"{gate}_emb.0.weight" for gate in GATES if gate != held} | {f"head.{i}.weight" for i in (0, 1, 3)}
    once = {prefix + name: tensor for name, tensor in published.tensors.items() if name not in gone}
    again = started(load(tmp_path / "all", published))
    run = started(load(tmp_path / "once", Published(published.config, once)))
    assert [guess.tokens for _, guess in guesses_of(run)] == [guess.tokens for _, guess in guesses_of(again)]


@pytest.mark.parametrize(("layout", "count"), [("lstm", 4), ("lstm, tied embeddings, scaled", 1)])
def test_tables_are_kept_once_in_memory(layout: str, count: int, tmp_path: Path) -> None:
    given = resources(tmp_path)
    held: list[int] = []

    def bind(program: Any, weights: Any, quantization: Any) -> Any:
        executor = given.bind(program, weights, quantization)
        held.append(sum(len(forms) for names, forms in executor.bank._entries.items() if "_emb." in str(names)))
        return executor

    saved = save(tmp_path / "speculator", PUBLISHED[layout].config, PUBLISHED[layout].tensors)
    mlp_speculator.load(MlpSpeculatorConfig(str(saved)), replace(given, bind=bind))
    assert held == [count] * 3, "the gates of the first step, those of the others, which bring no table, and the head"


@pytest.mark.parametrize(
    ("layout", "change", "without", "settings", "message"),
    [
        ("lstm", {"input_hidden_dim": 32}, "", {}, "trained for states of width 32, the target has 24"),
        ("lstm", {"input_hidden_dim": None}, "", {}, "'input_hidden_dim' must be an integer"),
        ("lstm", {"vocab_size": 60}, "", {}, "trained for a vocabulary of 60, the target has 50"),
        ("lstm", {"n_predict": 0}, "", {}, "'n_predict' must be from 1 to 64"),
        ("lstm", {"tie_weights": False}, "", {}, "'tie_weights' must be true"),
        ("lstm", {"method": "sum_gru"}, "", {}, "'method' is 'sum_gru', .* take one of these"),
        ("lstm", {"method": "sum_rnn"}, "", {}, r"is no MLP speculator: it has no tensor 'proj\.0\.0\.weight'"),
        ("rnn", {"method": "sum_lstm"}, "", {}, r"is no MLP speculator: it has no tensor 'forget_proj\.0\.weight'"),
        ("rnn", {"inner_dim": "40.40"}, "", {}, r"'inner_dim' is '40\.40', a stack of layers .* not supported"),
        ("rnn", {"emb_dim": "forty"}, "", {}, "'emb_dim' must be a width such as \"4096\", not 'forty'"),
        ("rnn", {"emb_dim": 40.0}, "", {}, "'emb_dim' must be a width"),
        ("rnn", {"proj_dim": "0"}, "", {}, "'proj_dim' must be a width"),
        ("rnn", {"proj_dim": "32"}, "", {}, "'inner_dim' 40, 'emb_dim' 40, 'proj_dim' 32 must be the same"),
        ("rnn", {"inner_dim": 48, "emb_dim": 48, "proj_dim": 48}, "", {}, r"'emb\.0\.0\.weight' .* is 50 x 40, but 50 x 48 is needed"),
        ("rnn", {"n_predict": 5}, "", {}, r"no tensor 'emb\.4\.0\.weight'"),
        ("rnn", {}, "head.3.weight", {}, r"no tensor 'head\.3\.weight'"),
        ("rnn", {}, "ln.1.0.bias", {}, r"no tensor 'ln\.1\.0\.bias'"),
        ("lstm", {}, "output_proj.1.weight", {}, r"no tensor 'output_proj\.1\.weight'"),
        ("lstm", {}, "input_emb.0.weight", {}, r"no tensor 'input_emb\.0\.weight'"),
        ("lstm", {}, "state_ln.0.bias", {}, r"no tensor 'state_ln\.0\.bias'"),
        ("lstm", {"inner_dim": 48, "emb_dim": 48, "proj_dim": 48}, "", {}, r"'forget_emb\.0\.weight' .* is 50 x 40, but 50 x 48 is needed"),
        ("lstm", {}, "", {"num_speculative_tokens": 5}, r"'num_speculative_tokens' is 5, .* trained for 4"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    layout: str, change: dict[str, Any], without: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    published = PUBLISHED[layout]
    changed = Published({**published.config, **change}, {name: t for name, t in published.tensors.items() if name != without})
    with pytest.raises(SpeculativeConfigError, match=message) as error:
        load(tmp_path, changed, **settings)
    assert "\n" not in str(error.value)


def test_widths_may_be_numbers_and_a_missing_method_is_the_first_one(tmp_path: Path) -> None:
    published = PUBLISHED["rnn, tied"]
    config = {**published.config, **{key: INNER for key in ("inner_dim", "emb_dim", "proj_dim")}}
    run = started(load(tmp_path, Published({key: x for key, x in config.items() if key != "method"}, published.tensors)))
    for _, guess in guesses_of(run):
        assert guess.tokens == [int(logits.argmax()) for logits in _expected(published, guess)]


@pytest.mark.parametrize("executor", ["torch", pytest.param("native", marks=EXECUTIONS[1].marks)])
@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("method", ["sum_lstm", "sum_rnn"])
def test_an_engine_says_the_same_with_and_without(method: str, sampling: str, executor: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_cache_gb": 0.1, "executor": executor, "dtype": "float32" if executor == "torch" else "bfloat16"}
    prompts = ["one two three one two three one two", "Hello! How are you", "ha ha ha ha ha ha"]
    params = [SamplingParams(max_tokens=16, seed=i, temperature=t, ignore_eos=True) for i, t in enumerate((0.0, 0.9, 0.7))]
    said = []
    with LLM(speculative_config={"method": "off"}, **options) as llm:
        said.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        model = llm._running().model
    published = _published(method, scaled=True, n=3, width=model.hf_config.hidden_size, vocab=model.vocab_size)
    save(tmp_path, published.config, published.tensors)
    speculative = {"model": str(tmp_path), "draft_sample_method": sampling}  # the method is found
    with LLM(speculative_config=fixed(speculative), **options) as llm:
        said.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        health = {p.name: p for p in llm._running().core.proposers.stats()}["mlp_speculator"]
        assert health.num_failures == 0 and health.draft_seconds > 0
    assert said[1] == said[0]


@pytest.mark.parametrize(("drawn", "return_probs"), [(False, False), (True, False), (True, True)])
def test_only_what_is_guessed_comes_from_a_device(drawn: bool, return_probs: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"draft_sample_method": "probabilistic"} if drawn else {}

    def play(is_far: bool) -> list[dict[str, Guess]]:
        run = started(load(tmp_path / str(is_far), PUBLISHED["lstm, tied embeddings, scaled"], **settings), (0.0, 1.0, 2.0), return_probs)
        if is_far:
            with_far_states(run.proposer)
        return [run.step({f"r{i}": 1 + (step + i) % 5 for i in range(3)}) for step in range(12)]

    device = compare(play, last_state_runs)
    assert max(device.to_host) < VOCAB or return_probs, "scores came to the host"
    assert device.to_device.count(INNER) == 4, "the norms go there once"
