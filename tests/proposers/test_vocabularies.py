"""Which tokens two vocabularies have in common, and a draft moved from one into the other."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_k import fixed
from paged_batches import Row, batch_of
from safetensors.torch import load_file, save_file
from saying import check_engine, said
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.weights import network_program
from foretoken.proposers.checkpoint import Checkpoint
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.vocabularies import Intersection, read_tokenizer, transplanted

DEMO = Path(__file__).parents[2] / "engine" / "demo_model"
TEXTS = ["Once upon a time there was a", "def add(a, b):", "The capital of France is", "Hello! How are"]


def byte_level(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0])


def sentencepiece(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], eos_token=words[0])


def test_tokens_are_compared_as_bytes() -> None:
    target = byte_level(["<s>", "a", "Ġ", "Ġa", "Ã©", "b", "<0x41>", "only", "Ċ"])
    draft = sentencepiece(["<s>", "b", "▁a", "é", "<0x61>", "a", "▁", "<0x0A>"])
    tokens = Intersection.of(target, draft, vocab_size=10)
    pairs = dict(zip(tokens.target_ids.tolist(), tokens.draft_ids.tolist(), strict=True))
    assert pairs == {1: 5, 2: 6, 3: 2, 4: 3, 5: 1, 8: 7}  # no special tokens, escaped bytes where there is nothing else
    assert tokens.read_as.tolist() == [0, 5, 6, 2, 3, 1, 0, 0, 7, 0]  # what the draft does not know is its unknown token


def test_vocabularies_without_much_in_common_are_refused() -> None:
    target = byte_level(["<s>", *(f"w{i}" for i in range(30)), "Ġ", "a"])
    with pytest.raises(SpeculativeConfigError, match="only 1 of the target's 33 tokens.*retokenize"):
        Intersection.of(target, sentencepiece(["<s>", "a", "x", "y"]), 33)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft with its vocabulary turned around, and a tenth of it under names that nobody else has."""
    folder = tmp_path_factory.mktemp("other")
    for file in (DEMO / "draft_model").iterdir():
        if file.is_file():
            shutil.copy(file, folder / file.name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, size = tokenizer["model"], 8192
    moved = {token: size - 1 - i for token, i in model["vocab"].items()}
    model["vocab"] = moved
    for added in tokenizer["added_tokens"]:
        added["id"] = size - 1 - added["id"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    name = next(folder.glob("*.safetensors"))
    tensors = load_file(name)
    turned = {n: t.flip(0).contiguous() if t.shape[0] == size else t for n, t in tensors.items()}
    save_file(turned, str(name), metadata={"format": "pt"})
    return folder


def test_a_moved_network_says_the_same_of_common_tokens(other: Path) -> None:
    target, draft = (AutoTokenizer.from_pretrained(folder) for folder in (DEMO / "target", other))
    tokens = Intersection.of(target, draft, 8192)
    assert len(tokens.target_ids) > 8000
    program = network_program(AutoConfig.from_pretrained(other))
    weights = {n: t for file in other.glob("*.safetensors") for n, t in load_file(file).items()}
    moved, moved_weights = transplanted(program, weights, tokens)
    whole, cut = TorchExecutor(program, weights, torch.float32), TorchExecutor(moved, moved_weights, torch.float32)
    text = target.encode(TEXTS[0])

    def scores(executor: Any, ids: list[int]) -> torch.Tensor:
        return executor.run(batch_of([Row(ids, 0, [0])]), executor.allocate(1, 16)).logits[-1]

    assert len(text) <= 16
    expected = scores(whole, tokens.read_as[torch.tensor(text)].tolist())[tokens.draft_ids]
    torch.testing.assert_close(scores(cut, text), expected, atol=1e-4, rtol=1e-4)
    assert cut.token_ids is not None and torch.equal(cut.token_ids, tokens.target_ids)


@pytest.mark.parametrize(
    "how", [{"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"}, {"heterogeneous_vocab": "retokenize"}]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_of_another_vocabulary_is_as_good_as_its_twin(how: dict[str, Any], temperature: float, other: Path) -> None:
    """The same network with the ids turned around: outputs are the target's, and guesses nearly those of the twin."""

    def run(config: dict[str, Any]) -> tuple[list[Any], float]:
        with LLM(str(DEMO / "target"), speculative_config=fixed(config), kv_cache_gb=0.2) as llm:
            params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
            texts, stats = said(llm, TEXTS, params), llm._running().core.stats()
            check_engine(llm)
            return texts, stats.num_accepted_tokens / max(stats.num_draft_tokens, 1)

    plain, _ = run({"method": "off"})
    sampled = {"draft_sample_method": "probabilistic"} if "use_heterogeneous_vocab" in how else {}
    twin, usual = run({"model": str(DEMO / "draft_model"), "num_speculative_tokens": 3, **sampled})
    texts, rate = run({"model": str(other), "num_speculative_tokens": 3, **how})
    assert texts == twin == plain
    assert rate > usual * (0.8 if "use_heterogeneous_vocab" in how else 0.6)  # special tokens are in no intersection


def test_another_vocabulary_by_mistake_says_what_to_set(other: Path) -> None:
    with pytest.raises(Exception, match="use_heterogeneous_vocab"):
        LLM(str(DEMO / "target"), speculative_config={"model": str(other)})


def test_a_parallel_draft_of_another_vocabulary_is_not_told_to_set_what_it_cannot(other: Path, tmp_path: Path) -> None:
    shutil.copytree(other, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text()) | {"pard_token": 7}))
    with pytest.raises(Exception, match=r"the target's own vocabulary; take one of the same family$"):
        LLM(str(DEMO / "target"), speculative_config={"model": str(tmp_path)})


def test_a_folder_that_is_no_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(SpeculativeConfigError, match="the tokenizer in .* cannot be loaded"):
        read_tokenizer(tmp_path)
    with pytest.raises(SpeculativeConfigError, match="config.json is no valid config of a model"):
        Checkpoint(tmp_path, {}).model_config()
