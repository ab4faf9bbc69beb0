"""A tiny target learns what is good and unlearns what goes round in circles, from packed files as the recipe writes them."""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from foretoken.proposers.training.loop import Plan, Run
from foretoken.proposers.training.optimizer import OptimizerSettings
from foretoken.proposers.training.packing import UNLEARN, Document, PackedStream, write
from foretoken.proposers.training.refine import unlearned
from foretoken.proposers.training.refinement import RefinementTrainee
from foretoken.proposers.training.target import Shape

PROMPT, GOOD, ROUND = [5, 6, 7], [20, 21, 22, 2], [30, 31, 32, 33, 34, 35]
CIRCLE = ROUND * 4


def probability(model: LlamaForCausalLM, text: list[int], token: int) -> float:
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([text]), bounds=(0, len(text))).logits[0, -1].softmax(-1)[token])


def test_only_the_third_round_is_unlearned() -> None:
    document = unlearned(PROMPT, [9, *CIRCLE, 10])
    assert document is not None
    places = np.flatnonzero(document.learn == UNLEARN)
    assert places[0] == len(PROMPT) + 1 + 2 * len(ROUND) and not (document.learn[:places[0]] == UNLEARN).any()
    assert document.token_ids[places].tolist() == [*ROUND, *ROUND]
    assert unlearned(PROMPT, GOOD) is None


def test_what_is_good_becomes_likely_and_a_third_round_unlikely(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Shape(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48).build(64)
    circle = unlearned(PROMPT, CIRCLE)
    assert circle is not None
    good = Document(np.array([*PROMPT, *GOOD], np.uint32), np.array([0] * len(PROMPT) + [1] * len(GOOD), np.uint8))
    write(tmp_path / "learned", [Document(circle.token_ids, np.ones(len(circle.token_ids), np.uint8))], 64)
    write(tmp_path / "refined", [good, circle] * 4, 64)
    settings = OptimizerSettings(lr=1e-2, table_lr=1e-2, weight_decay=0.0)

    def train(name: str, steps: int) -> dict[str, float]:
        plan = Plan(steps=steps, accumulate=1, optimizer=settings, half=False, workers=1)
        run = Run(RefinementTrainee(model), PackedStream([tmp_path / name], 64), plan, tmp_path / f"run_{name}")
        first = run.step()[0]
        assert run.train()
        return {key: total / weight for key, (total, weight) in first.items()}

    train("learned", 40)                                       # a model that goes round and round
    twice = [*PROMPT, *ROUND * 2]
    was = probability(model, twice, ROUND[0])
    assert was > 0.5 and probability(model, PROMPT, GOOD[0]) < 0.1
    assert train("refined", 40).keys() == {"loss", "loss_unlearned"}
    assert probability(model, twice, ROUND[0]) < was / 5
    assert probability(model, PROMPT, GOOD[0]) > 0.5
