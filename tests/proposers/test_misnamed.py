"""A drafter's folder under another method's name: one sentence says what it holds and which method reads it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretoken.engine.errors import ConfigError
from foretoken.engine.llm import LLM
from foretoken.engine.model_folder import embedded
from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.proposers.misnamed import misnamed

HELD = {
    "dflash": "a DFlash drafter", "draft_model": "a whole language model", "eagle": "an EAGLE head", "eagle3": "an EAGLE-3 head",
    "medusa": "Medusa heads", "mlp_speculator": "an MLP speculator", "mtp": "MTP layers", "ngram_cache": "an n-gram cache",
    "pard": "a PARD draft model",
}
READ_TOO = {("eagle", "eagle3"), ("eagle3", "eagle"), ("dspark", "dflash"), ("draft_model", "pard"), ("pard", "draft_model")}
"""(method, what it reads beside its own, or says itself what is missing of)."""


def told(method: str, folder: Path) -> str | None:
    config = parse_speculative_config({"method": method, "model": str(folder)})
    return misnamed(config.proposers, str(folder), folder)


@pytest.mark.parametrize("method", [*HELD, "dspark"])
@pytest.mark.parametrize("held", HELD)
def test_each_of_the_embedded_drafters_under_each_name(method: str, held: str) -> None:
    sentence = told(method, embedded(f"foretoken-demo/{held}"))
    if method == held or (method, held) in READ_TOO:
        assert sentence is None
    else:
        assert sentence and f'holds {HELD[held]}: say "method": "{held}" instead of "{method}"' in sentence


@pytest.mark.parametrize(("method", "held"), [("draft_model", "medusa"), ("medusa", "eagle3"), ("eagle3", "draft_model")])
def test_it_is_what_people_read(method: str, held: str) -> None:
    with pytest.raises(ConfigError, match=f'^speculative config: .* holds {HELD[held]}: say "method": "{held}"'):
        LLM("foretoken-demo", speculative_config={"method": method, "model": f"foretoken-demo/{held}"})


def test_the_target_itself_is_no_drafter() -> None:
    with pytest.raises(ConfigError, match="holds no Medusa heads"):
        LLM("foretoken-demo", speculative_config={"method": "medusa", "model": "foretoken-demo"})


def test_a_folder_that_says_nothing_is_left_to_the_method(tmp_path: Path) -> None:
    assert told("medusa", tmp_path) is None
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')  # as EAGLE's pickles say
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert told("eagle", tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    assert told("eagle", tmp_path) is None


def test_what_is_neither_a_model_nor_a_known_drafter(tmp_path: Path) -> None:
    """Nothing speaks for a method, so it was taken for a draft model."""
    (tmp_path / "config.json").write_text('{"architectures": ["OtherModel"]}')
    (tmp_path / "other_head.pth").write_bytes(b"")
    sentence = told("draft_model", tmp_path)
    assert sentence and sentence.startswith(f"{tmp_path}/other_head.pth is a pickle")
    save_file({"other.0.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    sentence = told("draft_model", tmp_path)
    assert sentence and "of a kind that is known (architectures ['OtherModel'], tensors other.0.weight, ...)" in sentence
    (tmp_path / "tokenizer.json").write_text("{}")
    assert told("draft_model", tmp_path) is None, "a model may be of a kind that comes later"
