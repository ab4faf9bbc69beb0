"""Gemma 4's assistants against transformers' own, while the real engine runs them: over its cache, whatever became of earlier guesses."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from as_on_a_gpu import engines_elsewhere
from fixed_k import fixed
from gemma4_assistants import WINDOW, K, save_assistant, save_target
from safetensors.torch import load_file, save_file
from saying import Made, check_engine, heard, said
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.engine.errors import ConfigError
from foretoken.kernels import native
from foretoken.proposers import assistant as assistant_module
from foretoken.proposers.last_state import LastStateProposer

PROMPTS = ["Hello there", "The quick brown fox jumps over", "a"]
NETWORKS: dict[str, dict[str, Any]] = {"torch": {"executor": "torch", "dtype": "float32"}}
if native.availability().isa is not None:
    NETWORKS["native"] = {"executor": "native", "dtype": "float32"}
    NETWORKS["narrow"] = {"executor": "native", "dtype": "bfloat16", "kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "clusters"])
def assistant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_assistant(tmp_path_factory.mktemp("assistant"), use_ordered_embeddings=request.param)


class Reference:
    """What an assistant guesses, by transformers' own over the keys and values of transformers' target."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self.target: Any = Gemma4ForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
        self.assistant: Any = Gemma4AssistantForCausalLM.from_pretrained(assistant, attn_implementation="eager").eval()

    @torch.no_grad()
    def scores(self, text: Sequence[int], guesses: Sequence[int]) -> torch.Tensor:
        """[len(guesses) + 1, V] behind the text and each guess."""
        known = self.target(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        shared = {kind: (k, v) for kind, (k, v) in known.shared_kv_states.items()}
        shared["sliding_attention"] = tuple(part[:, :, -WINDOW:] for part in shared["sliding_attention"])
        state, embed, found = known.hidden_states[-1][:, -1:], self.target.get_input_embeddings(), []
        for token in (text[-1], *guesses):
            pair = torch.cat([embed(torch.tensor([[token]])), state], -1)
            said = self.assistant(inputs_embeds=pair, position_ids=torch.tensor([[len(text) - 1]]), shared_kv_states=shared)
            state = said.last_hidden_state
            found.append(said.logits[0, 0])
        return torch.stack(found)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Everything that is guessed."""
    return heard(monkeypatch, LastStateProposer)


@pytest.fixture(params=NETWORKS)
def running(request: pytest.FixtureRequest, target: Path, assistant: Path) -> Iterator[tuple[str, LLM]]:
    config = fixed({"model": str(assistant), **({"quantization": "none"} if request.param == "native" else {})})
    with LLM(str(target), speculative_config=config, num_gpu_blocks_override=9, **NETWORKS[request.param]) as llm:  # some wait
        yield request.param, llm


def generate(llm: LLM, **settings: Any) -> list[list[int]]:
    return said(llm, PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True, seed=5, **settings))


def test_guesses_are_those_of_transformers(running: tuple[str, LLM], target: Path, assistant: Path, made: list[Made]) -> None:
    kind, llm = running
    plain = generate(llm, temperature=0, speculation={"method": "off"})
    made.clear()
    assert generate(llm, temperature=0) == plain
    reference, right = Reference(target, assistant), 0
    for text, guesses in made[::3]:
        scores = reference.scores(text, guesses[:-1])
        right += guesses == scores.argmax(-1).tolist()
    checked = len(made[::3])
    assert checked > 20 and {len(guesses) for _, guesses in made} >= {K, 1}
    assert any(len(text) > WINDOW + 8 for text, _ in made)
    assert right == checked if kind != "narrow" else right > checked // 2


def test_drawn_texts_are_those_without_guesses(running: tuple[str, LLM], made: list[Made]) -> None:
    _, llm = running
    for settings in ({"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.9, "n": 2}):
        plain = generate(llm, speculation={"method": "off"}, **settings)
        made.clear()
        assert generate(llm, **settings) == plain and made
    check_engine(llm)


def test_draws_and_banner(target: Path, made: list[Made]) -> None:
    folder = save_assistant(target.parent / "unified", is_unified=True)
    config = {"method": "mtp", "model": str(folder), "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    with LLM(str(target), speculative_config=fixed(config), kv_cache_gb=0.05, executor="torch") as llm:
        plain = generate(llm, temperature=1.0, speculation={"method": "off"})
        made.clear()
        assert generate(llm, temperature=1.0) == plain and {len(guesses) for _, guesses in made} == {1, 2}
        banner = "\n".join(llm._running().banner)
    assert "Gemma 4's assistant, 3 layers of width 24 over the target's keys and values (cache layers 0, 0, 1 of 2)" in banner
    assert "unused tensors" not in banner


def test_guesses_on_a_device_of_their_own(target: Path, made: list[Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: whatever would mix what lies there with what lies here fails."""
    config = fixed({"model": str(save_assistant(target.parent / "there"))})
    with engines_elsewhere(monkeypatch) as device, LLM(str(target), speculative_config=config, executor="torch", kv_cache_gb=0.05) as llm:
        found = generate(llm, temperature=0)
        assert made and len(device.calls) > 10_000
        assert not [health for health in llm._running().core.proposers.stats() if health.num_failures]
    monkeypatch.undo()
    with LLM(str(target), speculative_config={"method": "off"}, executor="torch", kv_cache_gb=0.05) as plain:
        assert generate(plain, temperature=0) == found


@pytest.mark.parametrize("said", ["", "[" * 100_000, '{"num_assistant_tokens": true}', '{"num_assistant_tokens": -3}', "[1]"])
def test_how_many_tokens_it_guesses_where_nobody_says(said: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(said)
    assert assistant_module._num_tokens(tmp_path) == assistant_module.DEFAULT_NUM_TOKENS
    (tmp_path / "generation_config.json").write_text('{"num_assistant_tokens": 7}')
    assert assistant_module._num_tokens(tmp_path) == 7


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "n": 2}], ids=["greedy", "drawn"])
def test_beside_trees_in_chunks_up_to_the_end(target: Path, made: list[Made], settings: dict[str, Any]) -> None:
    """Another proposer's accepted paths are moved to where the assistant reads."""
    trees = {"method": "ngram", "num_branches": 3, "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    configs = fixed([trees, {"model": str(save_assistant(target.parent / "beside"))}])
    options: dict[str, Any] = {"max_model_len": 60, "max_num_batched_tokens": 8, "max_num_seqs": 4, "kv_cache_gb": 0.05}
    with LLM(str(target), speculative_config=configs, **options) as llm:
        plain = generate(llm, speculation={"method": "off"}, **settings)
        made.clear()
        assert generate(llm, **settings) == plain and len(made) > 2
        assert settings["temperature"] or llm.stats().num_accepted_tokens > 5


def refused(target: Path, folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(target), speculative_config={"model": str(folder)}, kv_cache_gb=0.05)


def test_what_does_not_fit_is_said(target: Path, tmp_path: Path, tiny_target: Path) -> None:
    other = save_assistant(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    refused(tiny_target, other, "reads the keys and values of its Gemma 4: this target is a 'llama'")
    (other / "config.json").write_text(json.dumps({**config, "backbone_hidden_size": 48}))
    refused(target, other, "hidden size 48, this one has 32")
    for text_config, message in (
        ({"model_type": "llama"}, "no text_config of a Gemma 4"),
        (None, "no text_config of a Gemma 4"),
        ({"head_dim": 16}, "does not fit the target's"),
        ({"sliding_window": 16}, "sees 16 positions, the target's layer 24"),
        ({"hidden_size": -1}, "config.json has a size below 1"),
        ({"intermediate_size": -1}, "config.json has a size below 1"),
        ({"vocab_size": -1}, "config.json has a size below 1"),
        ({"rope_parameters": {}}, "rotary embedding differs by layer or is missing"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": -1}}}, "partial_rotary_factor -1"),
        ({"num_hidden_layers": "three"}, "no valid gemma4_text config"),
    ):
        changed = text_config and {**config["text_config"], **text_config}
        (other / "config.json").write_text(json.dumps({**config, "text_config": changed}))
        refused(target, other, message)
    (other / "config.json").write_text(json.dumps(config))
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "post_projection.weight"}, other / "model.safetensors")
    refused(target, other, "no tensor 'post_projection.weight'")
    with pytest.raises(ConfigError, match="runs through transformers, where they cannot be read"):
        LLM(str(target), speculative_config={"model": str(save_assistant(tmp_path / "whole"))}, executor="transformers", kv_cache_gb=0.05)


