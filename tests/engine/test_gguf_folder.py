"""Models and drafters of GGUF files, from the file to text; and what such files can be like."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from gguf_models import save_gguf
from tiny_models import TEXT, save_llama, save_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams
from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ModelLoadError
from foretoken.engine.gguf_tokenizer import tokenizer_files
from foretoken.engine.model import load_model
from foretoken.engine.model_folder import find_folder, weight_files
from foretoken.kernels.stored_tensors import read_tensors
from foretoken.proposers.training.reading import DataError
from foretoken.server.train.head import load_target

PROMPTS = ["def add(a, b):", "The quick brown fox jumps over the lazy dog. The quick"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "target", hidden_size=64, num_layers=2, seed=3)


def found(name: Path | str) -> Path:
    return find_folder(str(name), None, lambda line: None)


def texts(model: Path, **options: Any) -> list[str]:
    with LLM(str(model), **options) as llm:
        answers = llm.generate(PROMPTS, SamplingParams(temperature=0.8, seed=7, max_tokens=24))
        answers += llm.chat([{"role": "user", "content": "quick?"}], SamplingParams(temperature=0, max_tokens=24))
    return [answer.outputs[0].text for answer in answers]


def test_a_file_says_what_its_folder_says_and_guesses_for_it(tmp_path: Path, target: Path):
    file = save_gguf(target, tmp_path / "whole.gguf", "llama")
    expected = texts(target, dtype="float32", speculative_config=None)
    draft = {"method": "draft_model", "model": str(file), "num_speculative_tokens": 3}
    assert texts(file, dtype="float32", speculative_config=draft) == expected
    assert texts(target, dtype="float32", speculative_config=draft | {"heterogeneous_vocab": "intersection"}) == expected


def test_narrow_weights_stay_about_as_narrow(tmp_path: Path, target: Path):
    lines: list[str] = []
    load_model(ModelConfig(str(save_gguf(target, tmp_path / "narrow.gguf", "llama", type="Q4_0"))), lines.append)
    assert any("weights (stored as gguf)" in line and ("int4" in line or "not native" in line) for line in lines)


def test_a_folder_with_one_file_and_the_files_of_one_model(tmp_path: Path, target: Path):
    (tmp_path / "files").mkdir()
    file = save_gguf(target, tmp_path / "files" / "model-00001-of-00002.gguf", "llama")
    with pytest.raises(ModelLoadError, match="lacks 1 of the 2 files of model, the first is model-00002-of-00002.gguf"):
        found(file)
    shutil.copy(file, tmp_path / "files" / "model-00002-of-00002.gguf")
    shutil.copy(file, tmp_path / "files" / "mmproj-model.gguf")
    folder = found(tmp_path / "files")
    assert folder == found(file) and len(json.loads((folder / "config.json").read_text())["gguf_files"]) == 2
    shutil.copy(file, tmp_path / "files" / "other.gguf")
    with pytest.raises(ModelLoadError, match="has 2 GGUF files; name one of them: model-00001-of-00002.gguf, other.gguf"):
        found(tmp_path / "files")
    assert find_folder(str(tmp_path / "files"), None, print, files=["tokenizer.json"]) == tmp_path / "files"


def test_one_of_a_repositorys_files(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch):
    repository, asked = tmp_path / "snapshot", []
    (repository / "Q8_0").mkdir(parents=True)
    blob = save_gguf(target, tmp_path / "blob", "llama")
    for name in ("tiny-Q4_K_M.gguf", "Q8_0/tiny-Q8_0.gguf"):
        (repository / name).symlink_to(blob)

    def download(hub_id: str, allow_patterns: list[str], **options: Any) -> str:
        asked.append((hub_id, allow_patterns))
        return str(repository)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for kind, stem in (("q4_k_m", "tiny-Q4_K_M"), ("Q8_0", "tiny-Q8_0")):
        folder = found(f"someone/tiny-GGUF:{kind}")
        assert folder.name.startswith(stem) and len(read_tensors(weight_files(folder)))
    assert asked[0][0] == "someone/tiny-GGUF" and {"*Q4_K_M*.gguf", "*q4_k_m*.gguf"} < {*asked[0][1]}
    with pytest.raises(ModelLoadError, match="someone/tiny-GGUF has no GGUF file .* has Q5_0 in it"):
        found("someone/tiny-GGUF:Q5_0")


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("stablelm", {}, "architecture stablelm, which is read from safetensors only; of GGUF files llama, smollm3"),
        ("llama", {"expert_count": 8}, "a llama with experts, which is read"),
        ("llama", {"attention.head_count_kv": [2, 4]}, "layers that differ in attention.head_count_kv"),
        ("llama", {"rope.scaling.type": "yarn"}, "does not say llama.rope.scaling.factor"),
        ("llama", {"attention.key_length": 0, "attention.head_count": 0}, "says of its model makes no sense"),
    ],
)
def test_models_that_are_not_read(tmp_path: Path, target: Path, architecture: str, values: dict[str, Any], message: str):
    file = save_gguf(target, tmp_path / "other.gguf", architecture, values)
    with pytest.raises(ModelLoadError, match=message):
        found(file)


def test_a_tokenizer_that_is_not_read_may_be_named(tmp_path: Path, target: Path):
    file = save_gguf(target, tmp_path / "other.gguf", "llama", {"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(ModelLoadError, match="other.gguf: its tokenizer is of a kind that is not read: name the original model's"):
        load_model(ModelConfig(str(file)), lambda line: None)
    assert load_model(ModelConfig(str(file), tokenizer=str(target)), lambda line: None).tokenizer_size == 300


def test_no_drafter_is_trained_for_one(tmp_path: Path, target: Path):
    with pytest.raises(DataError, match="is a GGUF file: drafters learn from safetensors"):
        load_target(str(save_gguf(target, tmp_path / "whole.gguf", "llama")), "meta")


def rebuilt(folder: Path, values: dict[str, Any]) -> PreTrainedTokenizerFast:
    files = tokenizer_files({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    assert files is not None
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


SAMPLES = [*TEXT[:3], "  a  b\n\n\tc\r\n", "I'VE 1234567 naïve 日本語 🚀", "<|user|>hi<|end|>", "", "x" * 40]


def test_sentencepieces_merges_are_found(tmp_path: Path):
    """Of scores that count the merges, as its BPE has them: the same tokens as by the merges themselves."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>", "<|end|>"]
    bpe.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=420, special_tokens=first, show_progress=False))
    tokens = sorted(bpe.get_vocab(), key=bpe.get_vocab().__getitem__)
    types = [3 if token in first else 1 for token in tokens]
    types[0], types[3:259] = 2, [6] * 256
    values = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [float(-i) for i in range(len(tokens))]}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tokenizer = rebuilt(tmp_path / "prefixed", values)
    for text in SAMPLES:
        assert tokenizer.encode(text, add_special_tokens=False) == bpe.encode(text).ids
        assert tokenizer.encode(text)[0] == 1 and tokenizer.decode(bpe.encode(text).ids) == bpe.decode(bpe.encode(text).ids, False)
    bpe.normalizer = normalizers.Replace(" ", "▁")
    plain = rebuilt(tmp_path / "plain", values | {"add_space_prefix": False, "add_bos_token": False})
    assert [plain.encode(text) for text in SAMPLES] == [bpe.encode(text).ids for text in SAMPLES]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "It's 12345 it'S\n\n  x", ["It", "'s", " ", "123", "45", " it", "'S", "\n\n", " ", " x"]),
        ("qwen2", "a_b 123e\u0301", ["a", "_b", " ", "1", "2", "3", "é"]),
        ("smollm", "a 12 b!?\n\nc", ["a", " ", "1", "2", " b", "!?", "\n", "\n", "c"]),
        ("tekken", "fooBar's 12 ./\n", ["foo", "Bar", "'s", " ", "1", "2", " ./\n"]),
        ("gpt-4o", "fooBar's 1234 ./\n", ["foo", "Bar's", " ", "123", "4", " ./\n"]),
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
    ],
)
def test_how_texts_are_cut(tmp_path: Path, pre: str, text: str, pieces: list[str]):
    save_tokenizer(tmp_path / "tiny")
    bpe = json.loads((tmp_path / "tiny" / "tokenizer.json").read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    merges = [" ".join(pair) for pair in bpe["merges"]]
    cutter = rebuilt(tmp_path / pre, {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges}).backend_tokenizer
    text = cutter.normalizer.normalize_str(text) if cutter.normalizer else text
    assert [text[start:end] for _, (start, end) in cutter.pre_tokenizer.pre_tokenize_str(text)] == pieces
