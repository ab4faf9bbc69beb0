"""The plain reference of these tests against the code that trains published drafters, where that is installed."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import PUBLISHED, Drafter
from safetensors.torch import load_file

eagle3: Any = pytest.importorskip("speculators.models.eagle3")

STEPS = 3


@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_the_reference_is_what_speculators_computes(tmp_path: Path, norm_before_residual: bool) -> None:
    """Every guess at every slot, three deep: its model feeds back its own states and the text's tokens."""
    published = PUBLISHED["eagle3, speculators"]
    spec = replace(published.spec, norm_before_residual=norm_before_residual)
    drafter = Drafter.write(replace(published, spec=spec), tmp_path)
    config = json.loads((drafter.folder / "config.json").read_text())
    settings = {key: config[key] for key in ("transformer_layer_config", "draft_vocab_size", "norm_before_fc", "norm_output")}
    layers = eagle3.Eagle3SpeculatorConfig(
        **settings, norm_before_residual=norm_before_residual, eagle_aux_hidden_state_layer_ids=list(spec.taps)
    )
    layers.transformer_layer_config._attn_implementation = "eager"
    model = eagle3.Eagle3DraftModel(layers).eval()
    tensors = {k: v for k, v in load_file(drafter.folder / "model.safetensors").items() if k not in ("d2t", "t2d")}
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys

    text = random.Random(0).choices(range(59), k=10)
    states = torch.stack([torch.cat([drafter.target.state(text[: i + 1], tap) for tap in spec.taps]) for i in range(9)])
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output.detach()[0]))
    with torch.no_grad():
        model(states[None], torch.tensor([text[1:]]), torch.zeros(1, 9, dtype=torch.long), ttt_steps=STEPS)

    token_ids = torch.arange(spec.draft_vocab) + drafter.reference.weights["d2t"]
    for step in range(STEPS):
        for slot in range(9 - step):
            path = text[slot + 2 : slot + 2 + step]
            expected = drafter.reference.probs(text[: slot + 2], path)[token_ids]
            assert torch.allclose(found[step][slot].softmax(-1), expected, atol=1e-4), f"guess {step} at slot {slot}"
