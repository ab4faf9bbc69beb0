import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from decoding import Decoding
from pairs import assert_near
from quantised_checkpoints import quantise
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, MORE, SIZES, random_model, save_tokenizer, tiny_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ConfigError, ModelLoadError
from foretoken.engine.model import (
    LoadedModel,
    load_executor,
    load_model,
    read_config,
)
from foretoken.engine.model_folder import LFS_POINTER

VOCAB = 64


def config_of(family: str) -> transformers.PretrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    if family == "gpt_neox":
        return transformers.GPTNeoXConfig(**sizes)
    return transformers.LlamaConfig(**sizes, num_key_value_heads=2)


def write_model(folder: Path, family: str = "llama") -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config_of(family)).save_pretrained(folder)
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|end|>": 3, **{chr(97 + i): 4 + i for i in range(26)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="<|end|>")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def load(model: Path | str, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(model), **settings), lambda line: None)


def logits_of(folder: Path, tokens: list[int], **settings: Any) -> torch.Tensor:
    logits = Decoding(load(folder, dtype="float32", **settings).executor, max_len=8).feed([tokens]).logits
    assert logits is not None
    return logits


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.kernels.weights._require_finite", lambda name, tensor: pytest.fail("weights were read"))
    weights = 4 * (2 * VOCAB * 32 + 2 * (32 * 64 * 3 + 32 * 96 + 64) + 32)  # embedding and head, 2 layers, the last norm
    cache = 4 * 2 * 2 * (8 + 8) * 128  # 2 layers, 2 heads
    for executor, needed in (("torch", weights + cache), ("transformers", weights)):
        monkeypatch.setattr("foretoken.engine.model.free_bytes", lambda device, n=needed: n - 1)
        with pytest.raises(ModelLoadError, match=r"needs 0.09 MB for its weights \(float32\).*, but only [0-9.]+ MB of memory are free"):
            load(folder, executor=executor)
        monkeypatch.setattr("foretoken.engine.model.free_bytes", lambda device, n=needed: n)
        with pytest.raises(pytest.fail.Exception, match="weights were read"):
            load(folder, executor=executor)


def edit_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_a_whole_folder(folder: Path):
    lines: list[str] = []
    model = load_model(ModelConfig(model=str(folder), served_model_name="mine", executor="transformers"), lines.append)
    assert (model.name, model.path, model.vocab_size, model.tokenizer_size) == ("mine", folder, VOCAB, 30)
    assert (model.max_model_len, model.plan.execution.dtype, model.plan.kind) == (128, torch.float32, "transformers")
    assert model.tokenizer("a").input_ids == [4]
    for part in ("mine", "llama", "2 layers", "128", str(folder)):
        assert part in model.describe()
    assert lines and all("\n" not in line for line in [*lines, model.describe()])


def test_a_tokenizer_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.glob("tokenizer*"):
        file.rename(other / file.name)
    (other / "chat_template.jinja").write_text("mine")
    model = load(folder, tokenizer=str(other))
    assert model.tokenizer("a").input_ids == [4] and model.tokenizer.chat_template == "mine" and model.eos_token_ids == {2, 3}
    with pytest.raises(ConfigError, match="foretoken-demo does not fit: it has token ids up to 8191, and the model's end at 63"):
        load(folder, tokenizer="foretoken-demo")


IMPORTS = """
import sys
import transformers.models.auto.tokenization_auto  # brings in older versions what is not needed, too
known = set(sys.modules)
from foretoken.engine.config import ModelConfig
from foretoken.engine.model import load_model
assert load_model(ModelConfig(model=sys.argv[1]), print).plan.program is not None
unneeded = {"transformers.modeling_utils", "transformers.activations", "torch._dynamo", "torch.distributed.tensor", "sympy"}
print(sorted(unneeded & sys.modules.keys() - known))
"""


def test_a_model_with_a_program_needs_no_network_class(folder: Path):
    """To import those of transformers, and what they import in turn, takes longer than to load a small model."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_chat_template_of_a_model_that_can_see(folder: Path):
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load(folder).tokenizer.chat_template == "{{ messages }}"


def test_a_chat_template_from_elsewhere(folder: Path, tmp_path: Path):
    (tmp_path / "other.jinja").write_text("{{ messages[0] }}")
    for given, template in ((str(tmp_path / "other.jinja"), "{{ messages[0] }}"), ("{{ 'x' * 9000 }}", "{{ 'x' * 9000 }}")):
        assert load(folder, chat_template=given).tokenizer.chat_template == template
    for given, mistake in (("/no/x", "is a file .*, not '/no/x': .*No such file"), ("\n{% if %}", "is broken at its line 2: ")):
        with pytest.raises(ConfigError, match=f"chat_template {mistake}"):
            load(folder, chat_template=given)


def test_all_ends_are_found(folder: Path):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load(folder).eos_token_ids == {2, 3, 7, 8}  # config, tokenizer, generation config


@pytest.mark.parametrize("executor", ["torch", "transformers"])
def test_context_length(folder: Path, executor: str):
    assert load(folder, max_model_len=100, executor=executor).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len 129 is above the 128 positions"):
        load(folder, max_model_len=129, executor=executor)


@pytest.mark.parametrize("executor", ["auto", "torch", "transformers"])
def test_context_length_with_the_scaling_that_model_cards_tell_to_add(folder: Path, executor: str):
    """Qwen's: rope_scaling beside an unchanged max_position_embeddings."""
    edit_config(folder, rope_parameters=None, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    assert load(folder, executor=executor).max_model_len == 512


@pytest.mark.parametrize(
    ("entries", "phrase"),
    [
        ({"model_type": "never_heard_of"}, "has no model type 'never_heard_of'"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "code of its own"),
        ({"architectures": [None], "auto_map": {"AutoModel": "mine.Model"}}, "code of its own"),
        ({"architectures": ["MineForCausalLM"], "auto_map": {"AutoModel": "mine.Model"}}, "code of its own"),
        ({"quantization_config": {"quant_method": "torchao"}}, "is quantised \\(torchao\\), which is not read: take"),
        ({"num_hidden_layers": "two"}, "not a valid llama config"),
    ],
)
def test_configs_that_cannot_be_served(folder: Path, entries: dict[str, Any], phrase: str):
    edit_config(folder, **entries)
    with pytest.raises(ModelLoadError, match=phrase):
        read_config(folder)


@pytest.mark.parametrize(("kind", "published"), [("exaone", "Exaone"), ("internlm3", "InternLM3"), ("iquestcoder", "IQuestCoder")])
@torch.no_grad()
def test_llamas_that_were_published_with_code_of_their_own(tmp_path: Path, kind: str, published: str):
    """transformers knows them by now, and saves them under the names that they were published with."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = random_model(CONFIG_MAPPING[kind](**{**SIZES, "head_dim": 16}))
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    edit_config(tmp_path, architectures=[f"{published}ForCausalLM"], auto_map={"AutoModelForCausalLM": "mine.Model"})
    loaded = load(tmp_path, executor="torch")
    assert loaded.plan.program is not None
    tokens = [5, 9, 13, 2, 60]
    assert_near(Decoding(loaded.executor, max_len=8).feed([tokens]).logits, model(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_networks_with_another_head_are_refused(tmp_path: Path, family: str):
    """Their embedding would be taken for the head that they lack."""
    folder = write_model(tmp_path / "model", family)
    edit_config(folder, architectures=["SomeForSequenceClassification"], tie_word_embeddings=True)
    with pytest.raises(ModelLoadError, match="names it SomeForSequenceClassification, which does not continue text"):
        load(folder)


def test_quantisation_that_config_json_does_not_tell(folder: Path):
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(ModelLoadError, match=r"quantised \(modelopt with W4A8_AWQ\)"):
        read_config(folder)


def test_config_missing_or_broken(folder: Path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="config.json is not valid JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="has no config.json"):
        load(folder)


def test_other_weight_formats_say_how_to_convert(folder: Path):
    weights = folder / "model.safetensors"
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pytorch_model.bin only.*save_pretrained"):
        load(folder)
    (folder / "pytorch_model.bin").rename(folder / "tiny.gguf")
    with pytest.raises(ModelLoadError, match="tiny.gguf has the weights: name that file"):
        load(folder)
    with pytest.raises(ModelLoadError, match="tiny.gguf is no GGUF file that can be read"):
        load(folder / "tiny.gguf")
    with pytest.raises(ModelLoadError, match="is a file; name the folder"):
        load(folder / "config.json")
    (folder / "tiny.gguf").unlink()
    with pytest.raises(ModelLoadError, match="has no model.safetensors"):
        load(folder)


EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("executor", ["torch", "transformers"])
def test_a_head_of_its_own_is_used_whatever_config_json_says(folder: Path, executor: str):
    """transformers unties these; the embedding in its place would give other tokens without a word."""
    edit_config(folder, tie_word_embeddings=True)
    own = logits_of(folder, [5, 9, 13, 2, 60], executor=executor)
    edit_config(folder, tie_word_embeddings=False)
    assert torch.equal(own, logits_of(folder, [5, 9, 13, 2, 60], executor=executor))


@pytest.mark.parametrize("executor", ["torch", "transformers"])
@pytest.mark.parametrize(("kept", "prefix"), [(EMBEDDING, "model."), (HEAD, "model."), (EMBEDDING, "")])
def test_of_a_tied_pair_one_is_enough(folder: Path, executor: str, kept: str, prefix: str):
    """Qwen3-Embedding's tensors have nothing in front of their names."""
    edit_config(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    embedding, _ = tensors.pop(EMBEDDING), tensors.pop(HEAD)
    save_file({**tensors, EMBEDDING: embedding, HEAD: embedding.clone()}, folder / "model.safetensors", {"format": "pt"})
    both = logits_of(folder, [5, 9, 13], executor=executor)
    named = {name.replace("model.", prefix): tensor for name, tensor in {**tensors, kept: embedding}.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(both, logits_of(folder, [5, 9, 13], executor=executor))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_numbers_of_a_quantised_checkpoint_are_no_weights(folder: Path, dtype: torch.dtype):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, UP: tensors[UP].to(dtype)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"{UP} holds {str(dtype)[6:]}: the weights are quantised"):
        load(folder)


@pytest.mark.parametrize(("family", "executor"), [("llama", "torch"), ("gpt_neox", "transformers")])
def test_a_quantised_model_is_its_plain_twin_where_nothing_is_made_narrow(tmp_path: Path, family: str, executor: str):
    folder, twin = (write_model(tmp_path / name, family) for name in ("quantised", "plain"))
    plain = quantise(folder, "awq", re.compile(r"layers\..*(proj|query_key_value|dense.*)\.weight$"))
    save_file(dict(plain), twin / "model.safetensors", {"format": "pt"})
    models = [load(place, executor=executor, dtype="float32") for place in (folder, twin)]
    assert [model.plan.formats() for model in models] == ["weights (stored as awq), float32", "float32"]
    found, expected = (Decoding(model.executor, max_len=8).feed([[5, 9, 13]]).logits for model in models)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("executor", ["torch", "transformers"])
class TestDamage:
    def test_missing_shard(self, folder: Path, executor: str):
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
        for shard, members in shards.items():
            save_file({name: tensors[name] for name in members}, folder / shard, {"format": "pt"})
        weight_map = {name: shard for shard, members in shards.items() for name in members}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        assert load(folder, executor=executor).vocab_size == VOCAB
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelLoadError, match="lacks 1 of its 2 weight files, the first is model-00002-of-00002"):
            load(folder, executor=executor)

    def test_damaged_file(self, folder: Path, executor: str):
        file = folder / "model.safetensors"
        whole = file.read_bytes()
        for damaged in (whole[:-100], b"\xff" * 16 + whole[16:]):
            file.write_bytes(damaged)
            with pytest.raises(ModelLoadError, match="model.safetensors is damaged or incomplete"):
                load(folder, executor=executor)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, None])
    def test_numbers_that_are_none(self, folder: Path, executor: str, value: float | None):
        tensors = load_file(folder / "model.safetensors")
        up = tensors.pop(UP)
        if value is not None:
            up[3, 4] = value
            tensors[UP] = up
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelLoadError, match=rf"{'missing.*' if value is None else ''}{UP}"):
            load(folder, executor=executor)


def test_damaged_or_missing_tokenizer(folder: Path):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="the tokenizer in .* cannot be loaded"):
        load(folder)
    (folder / "tokenizer.json").write_bytes(LFS_POINTER)
    with pytest.raises(ModelLoadError, match="tokenizer.json is only a pointer of Git LFS"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="has no tokenizer: put the tokenizer.json there"):
        load(folder)


def test_tokenizers_that_need_more_than_is_installed(folder: Path):
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.MyTokenizer", None]}}))
    with pytest.raises(ModelLoadError, match="needs Python code of its own .auto_map in tokenizer_config.json., which is never run"):
        load(folder)
    config.write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"no model of sentencepiece")
    with pytest.raises(ModelLoadError, match="put tokenizer.json there, or install what reads tokenizer.model: pip install sentencepiece"):
        load(folder)


def test_draft_models_need_no_tokenizer(folder: Path):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    executor, _, _ = load_executor(folder, read_config(folder), ModelConfig(str(folder)))
    assert executor.vocab_size == VOCAB and executor.max_model_len == 128


def first_layers(family: str, folder: Path) -> tuple[Any, Any]:
    """The transformers model, and the executor of two of its layers."""
    model = random_model(tiny_config(family))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model, load_model(ModelConfig(str(folder), executor="torch"), lambda line: None, num_layers=2).executor


@pytest.mark.parametrize("family", [name for name in ("bamba", "falcon_h1", "minicpm3", "muse_glimmer") if name in MORE])
@torch.no_grad()
def test_the_first_layers_are_what_they_are_in_the_whole(tmp_path: Path, family: str) -> None:
    model, executor = first_layers(family, tmp_path)
    found = Decoding(executor).feed([[5, 7, 11, 3]], hidden=(2,)).hidden[2]
    assert_near(found, model(torch.tensor([[5, 7, 11, 3]]), output_hidden_states=True, use_cache=False).hidden_states[2][0])


@pytest.mark.skipif("gemma4" not in FAMILIES, reason="transformers has no Gemma 4")
def test_layers_with_embeddings_in_one_tensor_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have embeddings in one tensor"):
        first_layers("gemma4", tmp_path)
