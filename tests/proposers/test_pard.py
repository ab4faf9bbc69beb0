"""PARD against an ordinary forward of transformers with the masks appended, and PARD-2 with the target's states added by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import Elsewhere, Remote, here, there
from random_drafters import write
from recurrent_models import EMBEDDED
from safetensors.torch import load_file, save_file
from saying import Made, heard
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.engine.boot import Engine, boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.engine.errors import ConfigError
from foretoken.engine.request import Request, SamplingParams
from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.proposers.pard import _Projection

K = 4
PROMPTS = [list(range(40, 75)), [90, 91, 92] * 7, list(range(40, 75)) + [7], [300]]


def start(folder: Path, executor: str = "torch", **settings: Any) -> Engine:
    speculative = parse_speculative_config({"model": str(folder), "num_speculative_tokens": K, "adaptive": False, **settings})
    config = ModelConfig(str(EMBEDDED), dtype="float32", executor=executor)
    return boot(EngineConfig(config, CacheConfig(num_blocks=64), SchedulerConfig(64, 8, 64), speculative))


def drafts_of(engine: Engine) -> list[Made]:
    """Over requests that share a beginning and are cut into chunks."""
    seen = heard(pytest.MonkeyPatch(), engine.core.proposers.proposers[1])
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
        engine.core.add_request(Request(str(i), prompt, params, 0.0, 9, seed=i))
        engine.core.step(0.0)
    while engine.core.has_work:
        engine.core.step(0.0)
    engine.core.check()
    assert not any(p.num_failures for p in engine.core.proposers.stats())
    return seen


def masked_scores(folder: Path, text: Sequence[int], count: int, target: Any = None) -> Tensor:
    """[count, V] from one forward over the text and count - 1 masks."""
    config = json.loads((folder / "config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embedded = model.get_input_embeddings()(torch.tensor([[*text, *[config["pard_token"]] * (count - 1)]]))
    if target is not None:
        tensors = load_file(folder / "model.safetensors")
        states = target(torch.tensor([list(text[:-1])]), output_hidden_states=True).hidden_states
        tapped = torch.cat([states[layer][0] for layer in config["pard2_target_layers"]], -1)  # of positions 0 .. n - 2
        before = torch.cat([torch.zeros(1, tapped.shape[1]), tapped, tapped[-1:].expand(count - 1, -1)])
        embedded = embedded + 0.02 * (before @ tensors["target_proj.weight"].T + tensors["target_proj.bias"])
    return model(inputs_embeds=embedded).logits[0, len(text) - 1 :]


@pytest.mark.parametrize("method", ["pard", "pard2"])
@torch.no_grad()
def test_guesses_are_those_of_one_forward_with_masks(method: str, tmp_path: Path) -> None:
    folder = write(method, EMBEDDED, tmp_path / method, seed=3)
    if method == "pard2":  # loud enough to decide what is guessed
        tensors = load_file(folder / "model.safetensors")
        save_file({n: t * 60 if n.startswith("target_proj") else t for n, t in tensors.items()}, str(folder / "model.safetensors"))
    target: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32) if method == "pard2" else None
    seen = drafts_of(start(folder))
    assert len(seen) > 20 and {len(guesses) for _, guesses in seen} == {1, 2, 3, 4}
    for text, guesses in seen[::3]:
        scores = masked_scores(folder, text, len(guesses), target)
        best = scores.max(-1).values
        chosen = scores[torch.arange(len(guesses)), torch.tensor(guesses)]
        assert float((best - chosen).max()) < 2e-4, f"behind {len(text)} tokens"


def test_the_mask_token_has_two_names(tmp_path: Path) -> None:
    folder = write("pard", EMBEDDED, tmp_path / "pard", seed=3)
    guessed = drafts_of(start(folder))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"pard_token"', '"ptd_token_id"'))
    assert guessed and drafts_of(start(folder)) == guessed


def test_another_checkpoint_is_told_what_it_is(tmp_path: Path) -> None:
    plain = write("draft_model", EMBEDDED, tmp_path / "plain")
    with pytest.raises(ConfigError, match="no 'pard_token'"):
        start(plain, method="pard")
    folder = write("pard2", EMBEDDED, tmp_path / "pard2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard2_target_layers": [-1, -24]}))
    with pytest.raises(ConfigError, match="not states of a target of 8 layers"):
        start(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("target_proj")}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "warp_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"warp_model\.bin, a pickle"):
        start(folder)
    bad = write("pard", EMBEDDED, tmp_path / "bad")
    bad_config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(bad_config | {"pard_token": 9000}))
    with pytest.raises(ConfigError, match="outside its 8192 embeddings"):
        start(bad)


def test_states_are_projected_where_they_are() -> None:
    states, weight, bias = torch.randn(3, 4), torch.randn(4, 2), torch.randn(2)
    with Elsewhere() as device:
        project = _Projection(weight, bias)
        for _ in range(2):
            found = project(there(states))
            assert isinstance(found, Remote)
            torch.testing.assert_close(here(found), torch.addmm(bias, states, weight))
        assert device.to_device == [8, 2], "the weights move once"
