"""Muse Glimmer's assistant against transformers' own, driven by its candidate generator, while the real engine runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fixed_k import fixed
from saying import check_engine, heard, said
from tiny_models import MORE, random_model, save_tokenizer, tiny_config
from transformers import GenerationConfig

from foretoken import LLM, SamplingParams
from foretoken.engine.errors import ConfigError
from foretoken.kernels import native
from foretoken.proposers.learned import LearnedProposer

pytestmark = pytest.mark.skipif("muse_glimmer" not in MORE, reason="transformers has no Muse Glimmer")
BLOCK, WINDOW = 6, 4  # a block's ends do not see each other
PROMPTS = ["Hello there", "The quick brown fox jumps over", "a"]
NETWORKS = ["torch", "native"] if native.availability().isa is not None else ["torch"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muse")
    random_model(tiny_config("muse_glimmer", vocab_size=300, max_position_embeddings=128)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.MuseGlimmerAssistantConfig(
        **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 16, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
        **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW},
        **{"block_size": BLOCK, "mask_token_id": 299, "target_layer_ids": [0, 1]},
    )
    torch.manual_seed(2)
    model = transformers.MuseGlimmerAssistantModel(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, *((1.0, 0.2) if "norm" in name else (0.0, 0.3)))
    folder = tmp_path_factory.mktemp("assistant")
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def reference(target: Any, assistant: Any, text: list[int], count: int) -> list[int]:
    """What transformers guesses behind a text. Asked for fewer than a block holds, there are fewer masks."""
    assistant.config.block_size = count + 1
    known = target(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False)
    tables = target.get_input_embeddings(), target.get_output_embeddings()
    generator: Any = transformers.generation.DFlashTokenCandidateGenerator(assistant, *tables, GenerationConfig(max_length=1000))
    places = {"position_ids": torch.arange(len(text))[None], "attention_mask": None}
    found, _ = generator.get_candidates(torch.tensor([text]), places, known, is_first_iteration=False, n_last_matches=0)
    return found[0, len(text) :].tolist()


def generate(llm: LLM, **settings: Any) -> list[list[int]]:
    return said(llm, PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True, seed=5, **settings))


@pytest.mark.parametrize("network", NETWORKS)
def test_guesses_are_those_of_transformers(network: str, target: Path, assistant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = heard(monkeypatch, LearnedProposer)
    config = fixed({"model": str(assistant), **({"quantization": "none"} if network == "native" else {})})
    with LLM(str(target), speculative_config=config, kv_cache_gb=0.05, executor=network, dtype="float32") as llm:
        found = generate(llm, temperature=0)  # first: of what requests without guesses leave in the prefix cache no states are known
        greedy = made.copy()
        assert found == generate(llm, temperature=0, speculation={"method": "off"})
        assert generate(llm, temperature=0.8) == generate(llm, temperature=0.8, speculation={"method": "off"})
        assert len(made) > len(greedy)
        check_engine(llm)
        banner = "\n".join(llm._running().banner)
    whole = transformers.MuseGlimmerForConditionalGeneration.from_pretrained(target, attn_implementation="eager").eval()
    drafter = transformers.MuseGlimmerAssistantModel.from_pretrained(assistant, attn_implementation="eager").eval()
    for text, guesses in greedy[::2]:
        assert guesses == reference(whole, drafter, text, len(guesses))
    assert len(greedy) > 40 and {len(guesses) for _, guesses in greedy} == {*range(1, BLOCK)}
    assert "DFlash in the layout of Meta, 3 layers, reads the target's states before layers 1, 2" in banner
    assert "blocks of 6, bidirectional, windows in layers 0, 2, first guess in the first mask's place" in banner
    assert "embedding: the target's, head: the target's" in banner and "unused tensors" not in banner


@pytest.mark.parametrize(
    "change, words",
    [
        ({"target_layer_ids": [1, 13]}, "before layers 2, 14 .*it has layers 0 to 2: take the drafter that was trained for this target"),
        ({"target_layer_ids": [0, 1, 2]}, "reads states of 64 numbers, but the target's layers 1, 2, 3 have 3 x 32"),
        ({"mask_token_id": 201818}, "'mask_token_id' is 201818, but the embedding has 300 rows"),
    ],
)
def test_assistants_of_other_targets(target: Path, assistant: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "model.safetensors").symlink_to(assistant / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((assistant / "config.json").read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        LLM(str(target), speculative_config={"model": str(tmp_path)}, kv_cache_gb=0.05)
