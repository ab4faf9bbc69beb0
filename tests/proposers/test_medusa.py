"""Medusa heads in every published layout, compared with the formula written out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import last_state_runs
import pytest
import torch
from elsewhere import compare, with_far_states
from last_state_runs import VOCAB, WIDTH, Run, check_batches, opened, resources, save, state_of, target_head
from mlp_speculator_runs import guesses_of, started
from pretended_engine import EXECUTIONS, TORCH, Guess
from torch import Tensor
from torch.nn.functional import silu

from foretoken.kernels.execution import Execution
from foretoken.proposers import medusa
from foretoken.proposers.config import MedusaConfig, StaticTree
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.loading import LoadedProposer

HEADS, KNOWN = 3, 30
PARTS = ("weight", "bias")
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (0, 3, 1)))
MAP = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:KNOWN]


@dataclass(frozen=True)
class Published:
    layout: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    layers: Sequence[Sequence[tuple[Tensor, Tensor | None]]]  # of each head: weight, bias
    heads: Sequence[Tensor]
    token_ids: Tensor | None = None
    file: str = "model.safetensors"

    def scores(self, head: int, state: Tensor) -> Tensor:
        """[VOCAB] by token id: the formula of the paper."""
        x = state
        for weight, bias in self.layers[head]:
            linear = weight @ x if bias is None else weight @ x + bias
            x = x + silu(linear)
        scores = self.heads[head] @ x
        if self.token_ids is None:
            return scores
        return torch.full((VOCAB,), -torch.inf).index_copy(0, self.token_ids, scores)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _published() -> dict[str, Published]:
    torch.manual_seed(3)
    layers = [[(_random(WIDTH, WIDTH), _random(WIDTH))] for _ in range(HEADS)]
    deep = [[(_random(WIDTH, WIDTH), None) for _ in range(2)] for _ in range(HEADS)]
    heads = [3 * _random(VOCAB, WIDTH) for _ in range(HEADS)]
    small = [3 * _random(KNOWN, WIDTH) for _ in range(HEADS)]
    v1 = {f"{h}.0.linear.{part}": t for h in range(HEADS) for part, t in zip(PARTS, layers[h][0], strict=True)}
    with_heads = {**v1, **{f"{h}.1.weight": heads[h] for h in range(HEADS)}}
    vllm = {f"blocks.{h}.layers.{i}.weight": deep[h][i][0] for h in range(HEADS) for i in range(2)}
    biased = {f"blocks.{h}.layers.0.{part}": t for h in range(HEADS) for part, t in zip(PARTS, layers[h][0], strict=True)}
    fc_config = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # says 2, has 3
    vllm_config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 2, "hidden_size": WIDTH, "vocab_size": VOCAB}
    whole = {"model.embed_tokens.weight": _random(VOCAB, WIDTH), "lm_head.weight": _random(VOCAB, WIDTH)}
    own_target = [target_head()] * HEADS
    return {
        "v1": Published("FasterDecoding", fc_config, with_heads, layers, heads, file="medusa_lm_head.safetensors"),
        "medusa-2": Published("FasterDecoding", fc_config, {**_prefixed("medusa_head.", with_heads), **whole}, layers, heads),
        "tgi v2": Published("FasterDecoding", fc_config, v1, layers, own_target, file="medusa_lm_head.safetensors"),
        "vllm": Published("vLLM", vllm_config, {**vllm, **{f"lm_heads.{h}.weight": heads[h] for h in range(HEADS)}}, deep, heads),
        "vllm, truncated": Published(
            "vLLM",
            {**vllm_config, "truncated_vocab_size": KNOWN},
            {**vllm, **{f"lm_heads.{h}.weight": small[h] for h in range(HEADS)}, "token_map": MAP},
            deep,
            small,
            MAP,
        ),
        "vllm, original head": Published(
            "vLLM",
            {**vllm_config, "medusa_fc_bias": True, "original_lm_head": True, "num_hidden_layers": 1},
            _prefixed("medusa_heads.", {**biased, "lm_head.weight": heads[0]}),
            layers,
            [heads[0]] * HEADS,
        ),
    }


PUBLISHED = _published()


def _load(folder: Path, published: Published, execution: Execution = TORCH, **settings: Any) -> LoadedProposer:
    saved = save(folder / "heads", published.config, published.tensors, published.file)
    return medusa.load(MedusaConfig(str(saved), quantization="none", **settings), resources(folder, execution))


def _run(loaded: LoadedProposer) -> Run:
    return started(loaded, (0.0, 1.0, 2.0))


def _begun(loaded: LoadedProposer) -> Run:
    """All prompts have been read."""
    run = _run(loaded)
    run.step({})
    run.step({})
    return run


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", PUBLISHED)
def test_chains_are_the_best_tokens_of_the_heads(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    loaded = _load(tmp_path, published, execution)
    assert loaded.found[0].startswith(f"{HEADS} of {HEADS} heads") and published.layout in loaded.found[0]
    assert len(loaded.found) == 1, "every tensor is accounted for"
    guesses = [guess for _, guess in guesses_of(_run(loaded))]
    for guess in guesses:
        assert guess.parents == list(range(-1, len(guess.tokens) - 1))
        for head, (token, confidence) in enumerate(zip(guess.tokens, guess.confidence, strict=True)):
            probs = torch.softmax(published.scores(head, state_of(guess.text[:-1])), -1)
            assert token == int(probs.argmax())
            assert confidence == pytest.approx(float(probs[token]), abs=1e-5)
    assert {len(guess.tokens) for guess in guesses} == {1, 2, 3} and sum(len(guess.tokens) for guess in guesses) > 50


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", ["v1", "tgi v2", "vllm, truncated"])
def test_trees_are_paths_of_ranks(layout: str, execution: Execution, tmp_path: Path) -> None:
    published = PUBLISHED[layout]
    run = _run(_load(tmp_path, published, execution, tree=TREE))
    assert run.proposer.max_tokens == len(TREE.paths)
    count = 0
    for step in range(12):
        for guess in run.step({f"r{i}": 2 + 3 * ((step + i) % 3) for i in range(3)}).values():
            for node, token in enumerate(guess.tokens):
                path = TREE.paths[node]
                assert [TREE.paths[n] for n in guess.path(node)] == [path[: d + 1] for d in range(len(path))]
                ranked, ids = torch.softmax(published.scores(len(path) - 1, state_of(guess.text[:-1])), -1).sort(descending=True)
                assert token == ids[path[-1]]
                assert guess.confidence[node] == pytest.approx(float(ranked[path[-1]]), abs=1e-5)
                count += 1
            siblings = list(zip(guess.parents, guess.tokens, strict=True))
            assert len(set(siblings)) == len(siblings)
    assert count > 80


def test_scores_are_the_formulas_number_by_number(tmp_path: Path) -> None:
    for layout in ("v1", "vllm", "vllm, original head"):
        published = PUBLISHED[layout]
        run = _run(_load(tmp_path / layout, published))
        states = torch.randn(5, WIDTH)
        scores = run.proposer._heads._scores.of(states, HEADS)  # type: ignore[attr-defined]
        expected = torch.stack([torch.stack([published.scores(head, state) for head in range(HEADS)]) for state in states])
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_the_batch_does_not_matter(tmp_path: Path) -> None:
    loaded = _load(tmp_path, PUBLISHED["v1"], tree=TREE)
    check_batches(lambda: _run(loaded), {"r0": 5, "r2": 8, "r1": 2})


def test_heads_may_lie_in_the_targets_own_folder(tmp_path: Path) -> None:
    published = PUBLISHED["medusa-2"]
    save(tmp_path, published.config, published.tensors)
    loaded = medusa.load(MedusaConfig(quantization="none"), resources(tmp_path))
    guess = _begun(loaded).step({"r0": 3})["r0"]
    state = state_of(guess.text[:-1])
    assert guess.tokens == [int(published.scores(head, state).argmax()) for head in range(HEADS)]


def test_the_targets_scale_of_logits_is_in_the_confidence(tmp_path: Path) -> None:
    published = PUBLISHED["tgi v2"]
    saved = save(tmp_path / "heads", published.config, published.tensors)
    scaled = resources(tmp_path, TORCH, logits_scale=0.25, logits_softcap=2.0)
    guess = _begun(medusa.load(MedusaConfig(str(saved)), scaled)).step({"r0": 1})["r0"]
    scores = 2.0 * torch.tanh(published.scores(0, state_of(guess.text[:-1])) * 0.25 / 2.0)
    assert guess.confidence[0] == pytest.approx(float(torch.softmax(scores, -1).max()), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "k"), [({}, 3), ({"num_heads": 2, "num_speculative_tokens": 2}, 2), ({"num_speculative_tokens": 1}, 1)]
)
def test_settings_choose_how_many_heads_guess(settings: dict[str, Any], k: int, tmp_path: Path) -> None:
    loaded = _load(tmp_path, PUBLISHED["v1"], **settings)
    assert loaded.open(opened()).max_tokens == k
    assert loaded.found[0].startswith(f"{k} of 3 heads") and len(loaded.found) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 4}, r"'num_heads' is 4, but .* has 3 Medusa heads"),
        ({"num_speculative_tokens": 5}, r"'num_speculative_tokens' is 5, but there are 3 Medusa heads"),
        ({"tree": StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))}, r"4 levels deep, but there are 3"),
        ({"tree": StaticTree(((0,), (60,)))}, r"rank 60, but the Medusa heads .* know 50 tokens"),
    ],
)
def test_more_than_there_is_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpeculativeConfigError, match=message):
        _load(tmp_path, PUBLISHED["v1"], **settings)


def _without(published: Published, *names: str) -> Published:
    return replace(published, tensors={name: t for name, t in published.tensors.items() if name not in names})


def _with(published: Published, **tensors: Tensor) -> Published:
    return replace(published, tensors={**published.tensors, **{name.replace("__", "."): t for name, t in tensors.items()}})


@pytest.mark.parametrize(
    ("published", "message"),
    [
        (replace(PUBLISHED["v1"], tensors={"x": torch.ones(2)}), "holds no Medusa heads"),
        (_without(PUBLISHED["v1"], "1.0.linear.weight"), "head 1 has no layer 0"),
        (_without(PUBLISHED["v1"], "1.1.weight"), r"output layers for some .* but no '1\.1\.weight'"),
        (_with(PUBLISHED["vllm"], blocks__1__layers__0__weight=torch.ones(WIDTH, 8)), r"is 24 x 8, but 24 x 24 is needed"),
        (_with(PUBLISHED["vllm"], blocks__0__layers__0__weight=torch.ones(8, 8)), r"states of width 8, but the target's have 24"),
        (_with(PUBLISHED["vllm"], lm_heads__0__weight=torch.ones(40, WIDTH)), r"scores 40 tokens, .* 50 tokens of the target"),
        (_with(PUBLISHED["vllm, truncated"], token_map=torch.arange(30) * 2), "does not map the draft's vocabulary"),
        (_with(PUBLISHED["vllm, truncated"], token_map=torch.zeros(30, dtype=torch.int64)), "does not map the draft's vocabulary"),
        (_with(PUBLISHED["v1"], **{"0.1.weight": torch.full((VOCAB, WIDTH), torch.nan)}), "NaN"),
    ],
)
def test_what_does_not_fit_is_refused(published: Published, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpeculativeConfigError, match=message):
        _load(tmp_path, published)


def test_unknown_tensors_are_told(tmp_path: Path) -> None:
    loaded = _load(tmp_path, _with(PUBLISHED["v1"], strange=torch.ones(2)))
    assert loaded.found[1] == "unused tensors: strange"


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("layout", ["v1", "vllm, original head", "vllm, truncated"])
def test_heads_on_a_device_are_waited_for_once(layout: str, tree: StaticTree | None, tmp_path: Path) -> None:
    def play(is_far: bool) -> list[dict[str, Guess]]:
        run = _run(_load(tmp_path / str(is_far), PUBLISHED[layout], tree=tree))
        if is_far:
            with_far_states(run.proposer)
        return [run.step({f"r{i}": 1 + (step + i) % 5 for i in range(3)}) for step in range(12)]

    copied = compare(play, last_state_runs).to_host
    assert max(copied) < VOCAB, "scores came to the host"
    assert len(copied) <= 3 * 12  # are the states sound, which tokens, how likely
