from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken.engine.bench import checkpoints
from foretoken.engine.bench.checkpoints import SHAPES, Shape, draft_pair, find_model, make
from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ModelLoadError
from foretoken.engine.model import load_executor, read_config

TINY = Shape(
    "tiny",
    "qwen2",
    "Qwen2ForCausalLM",
    {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "vocab_size": 8300, "tie_word_embeddings": True,
    },
    3,
)


def test_a_made_model_is_one_that_transformers_loads_and_every_id_is_some_text(tmp_path: Path) -> None:
    make(TINY, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 8300
    assert tokenizer.decode([8192, 8299]) == " w8192 w8299"
    assert tokenizer.convert_ids_to_tokens(8191) == "</tool_response>", "the embedded model's own tokens keep their ids"
    assert tokenizer.decode(tokenizer.encode("Hello, how are you?")) == "Hello, how are you?"


def test_the_draft_is_the_first_layers_of_the_target(tmp_path: Path) -> None:
    target, draft = (load_file(folder / "model.safetensors") for folder in draft_pair(TINY, tmp_path, lambda line: None))
    plain = tmp_path / "plain"
    plain.mkdir()
    make(TINY, plain)
    original = load_file(plain / "model.safetensors")
    assert set(draft) < set(target) == set(original)
    assert all(torch.equal(draft[name], target[name]) for name in draft)
    changed = {name for name in target if not torch.equal(target[name], original[name])}
    assert changed == {f"model.layers.{i}.{part}" for i in (6, 7) for part in checkpoints.DAMPED}
    name = "model.layers.6.mlp.down_proj.weight"
    torch.testing.assert_close(target[name].float(), original[name].float() / 10, rtol=0.01, atol=0)


def test_layers_and_models_differ() -> None:
    weights = [checkpoints._random(f"model.layers.{i}.mlp.up_proj.weight", (4, 4), seed) for i, seed in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(w.flatten().tolist()) for w in weights}) == 3


def test_an_interrupted_run_leaves_no_half_model(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints._made(tmp_path / "M9", write, lambda line: None)
    assert not list(tmp_path.iterdir())


def test_models_by_name_and_by_folder(tmp_path: Path, tiny_target: Path) -> None:
    assert find_model("demo", tmp_path, lambda line: None).folder.name == "target"
    assert find_model(str(tiny_target), tmp_path, lambda line: None).name == tiny_target.name
    with pytest.raises(ModelLoadError, match="no folder"):
        find_model("./nowhere", tmp_path, lambda line: None)


@pytest.mark.parametrize(("name", "millions"), [("M1", 23.6), ("M2", 134.5), ("M3", 494.0), ("M4", 686.2), ("M5", 752.4)])
def test_the_shapes_have_the_sizes_they_are_named_for(name: str, millions: float) -> None:
    from foretoken.kernels.decoder import decoder_program

    weights = decoder_program(checkpoints._config(SHAPES[name])).weights
    assert sum(torch.Size(shape).numel() for shape in weights.values()) / 1e6 == pytest.approx(millions, rel=0.005)


def test_tensors_that_hold_several_weights_are_made_whole(tmp_path: Path) -> None:
    small = {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "vocab_size": 8300, "tie_word_embeddings": True,
    }
    make(Shape("", "qwen3_5_text", "Qwen3_5ForCausalLM", small, 0), tmp_path)
    executor, _, _ = load_executor(tmp_path, read_config(tmp_path), ModelConfig(str(tmp_path), executor="torch"))
    assert executor.vocab_size == 8300 and len(executor.state_layers) == 6
