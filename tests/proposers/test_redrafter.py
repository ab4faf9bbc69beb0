"""ReDrafter in the published layout, compared with the formula written out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from last_state_runs import VOCAB, WIDTH, resources, save, state_of
from mlp_speculator_runs import guesses_of, is_drawn_as_the_target_would, started
from pretended_engine import EXECUTIONS, TORCH
from torch import Tensor
from torch.nn.functional import silu

from foretoken.kernels.execution import Execution
from foretoken.proposers import redrafter
from foretoken.proposers.config import MedusaConfig, StaticTree
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.detection import detect_method
from foretoken.proposers.loading import LoadedProposer

TREE = StaticTree(((0,), (1,), (0, 0), (1, 2), (1, 2, 0)))
INNER = 40
KINDS = {"rnn": (True, 2, INNER), "sum": (False, 1, INNER), "no projection": (True, 0, 2 * WIDTH)}


def tensors_of(kind: str) -> dict[str, Tensor]:
    is_learned, blocks, inner = KINDS[kind]
    torch.manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {f"lm_head.{blocks}.weight": (VOCAB, inner)}
    if is_learned:
        shapes |= {"rnn_w.weight": (WIDTH, WIDTH), "rnn_u.weight": (WIDTH, WIDTH), "rnn_u.bias": (WIDTH,)}
    if inner != 2 * WIDTH:
        shapes |= {"input_proj.weight": (inner, 2 * WIDTH), "input_proj.bias": (inner,)}
    for i in range(blocks):
        shapes |= {f"lm_head.{i}.linear.weight": (inner, inner), f"lm_head.{i}.linear.bias": (inner,)}
    return {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def scores(kind: str, state: Tensor, tokens: Sequence[int]) -> Tensor:
    """[VOCAB] behind tokens, the last known one and the guesses (Zhang et al. 2024)."""
    is_learned, blocks, inner = KINDS[kind]
    t = {name: tensor.double() for name, tensor in tensors_of(kind).items()}
    torch.manual_seed(99)
    embedding, own = torch.randn(VOCAB, WIDTH).double(), torch.zeros(WIDTH, dtype=torch.float64)
    for token in tokens:
        e = embedding[token]
        own = silu(t["rnn_w.weight"] @ e + t["rnn_u.weight"] @ own + t["rnn_u.bias"]) if is_learned else e + own
    x = torch.cat([state.double(), own])
    if inner != 2 * WIDTH:
        x = t["input_proj.weight"] @ x + t["input_proj.bias"]
    for i in range(blocks):
        x = x + silu(t[f"lm_head.{i}.linear.weight"] @ x + t[f"lm_head.{i}.linear.bias"])
    return (t[f"lm_head.{blocks}.weight"] @ x).float()


def load(folder: Path, kind: str, execution: Execution = TORCH, without: str = "", **settings: Any) -> LoadedProposer:
    tensors = {name: tensor for name, tensor in tensors_of(kind).items() if name != without}
    saved = save(folder / "redrafter", {"model_type": "recurrent_drafting_drafter", "rnn": KINDS[kind][0]}, tensors)
    assert detect_method(str(saved)) == "redrafter"
    return redrafter.load(MedusaConfig(str(saved), method="redrafter", quantization="none", **settings), resources(folder, execution))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_chains_and_trees_are_those_of_the_formula(kind: str, execution: Execution, tmp_path: Path) -> None:
    loaded = load(tmp_path, kind, execution, num_speculative_tokens=4)
    assert loaded.found == (
        f"{'a recurrent network' if KINDS[kind][0] else 'the sum of the embeddings so far'} beside the target's last state, "
        f"{KINDS[kind][1]} block{'s' * (KINDS[kind][1] != 1)}; embedding: the target's, head: its own",
    )
    trees = load(tmp_path, kind, execution, tree=TREE)
    for paths, guesses in ((None, guesses_of(started(loaded))), (TREE.paths, guesses_of(started(trees)))):
        assert len(guesses) > 25 and max(len(guess.tokens) for _, guess in guesses) == (5 if paths else 4)
        for _, guess in guesses:
            for node, token in enumerate(guess.tokens):
                rank, before = paths[node][-1] if paths else 0, [guess.tokens[n] for n in guess.path(node)[:-1]]
                probs = torch.softmax(scores(kind, state_of(guess.text[:-1]), [guess.text[-1], *before]), -1)
                best, ids = probs.sort(descending=True)
                assert token == ids[rank] and guess.confidence[node] == pytest.approx(float(best[rank]), abs=1e-4)
                assert guess.parents[node] == (paths.index(paths[node][:-1]) if paths and before else node - 1 if before else -1)


def test_rows_that_sample_draw_under_the_targets_own_noise(tmp_path: Path) -> None:
    run = started(load(tmp_path, "rnn", draft_sample_method="probabilistic"), (0.0, 1.0, 0.7))
    for name, guess in guesses_of(run):
        for j in range(len(guess.tokens)):
            logits = scores("rnn", state_of(guess.text[:-1]), [guess.text[-1], *guess.tokens[:j]])
            assert is_drawn_as_the_target_would(guess, run.texts[name].draw, j, logits)


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("lm_head.2.weight", "holds no ReDrafter: it has no tensor 'lm_head.2.weight' behind 2 blocks"),
        ("rnn_w.weight", "no tensor 'rnn_w.weight'"),
        ("input_proj.weight", "no tensor 'input_proj.weight'"),
    ],
)
def test_what_is_missing_is_said(without: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpeculativeConfigError, match=message):
        load(tmp_path, "rnn", without=without)
