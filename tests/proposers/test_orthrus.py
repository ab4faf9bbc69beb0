"""An Orthrus guesses what transformers makes of a block with the second set of weights, and its texts stay the target's."""

import copy
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_k import fixed
from orthrus_targets import add_view
from recurrent_models import EMBEDDED
from safetensors.torch import load_file, save_file
from saying import heard, said
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.engine.errors import ConfigError
from foretoken.kernels import native
from foretoken.server.bench.speculation_methods import find_methods

VOCAB, MASK, BLOCK = 320, 319, 8
CACHE = "cache" if "cache" in signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"  # its older name
NETWORKS: dict[str, dict[str, Any]] = {"torch": {"executor": "torch"}}
if native.availability().isa is not None:
    NETWORKS |= {"native": {}, "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}}


LACKING: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "no second set of attention weights .* it is no Orthrus": lambda w: {name: t for name, t in w.items() if "_diff." not in name},
    "no second 'model.layers.1.self_attn.k_proj.weight', but one of another layer": lambda w: {
        name: t for name, t in w.items() if "1.self_attn.k_proj_diff." not in name
    },
    "has 'model.layers.0.self_attn.x_diff.weight', but no 'model.layers.0.self_attn.x.weight'": lambda w: {
        **w, "model.layers.0.self_attn.x_diff.weight": torch.ones(2)
    },
    "'model.layers.2.self_attn.q_proj_diff.weight' holds torch.int8": lambda w: {
        name: t.to(torch.int8) if "2.self_attn.q_proj_diff." in name else t for name, t in w.items()
    },
    "contains NaN": lambda w: {name: t * torch.nan if "o_proj_diff" in name else t for name, t in w.items()},
}


def changed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def save(folder: Path, **config: Any) -> Path:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)).float()
    model.save_pretrained(folder)
    remote = {"architectures": ["OrthrusLM"], "auto_map": {"AutoModelForCausalLM": "modeling_orthrus.OrthrusLM"}}
    add_view(folder, **remote, **{"mask_token_id": MASK, "block_size": BLOCK, **config})
    PreTrainedTokenizerFast.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("orthrus"))


class Reference:
    """The published loop: a causal pass over the text, then one without a mask over a block, with the second set of attention weights."""

    def __init__(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        config = Qwen3Config.from_pretrained(folder)
        config._attn_implementation = "eager"
        self.target = Qwen3ForCausalLM(config).float().eval()
        self.target.load_state_dict({name: weight for name, weight in weights.items() if "_diff." not in name}, strict=False)
        self.view = copy.deepcopy(self.target)
        second = {name.replace("_diff.", "."): weight for name, weight in weights.items() if "_diff." in name}
        self.view.load_state_dict(second, strict=False)

    @torch.no_grad()
    def guesses(self, text: list[int], count: int) -> Tensor:
        """[count, VOCAB] of the tokens behind a text."""
        known = len(text) - 1
        cache = {CACHE: DynamicCache()}
        self.target(torch.tensor([text[:-1]]), **cache)
        block = torch.tensor([[text[-1], *[MASK] * count]])
        sees_all = torch.zeros(1, 1, count + 1, known + count + 1)
        positions = torch.arange(known, known + count + 1)[None]
        return self.view(block, position_ids=positions, attention_mask=sees_all, **cache).logits[0, :-1]


def say(folder: Path, speculative: dict[str, Any], prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], Any]:
    params = [
        SamplingParams(max_tokens=20, temperature=t, seed=i, ignore_eos=True, frequency_penalty=0.3 * (i % 2))
        for i, t in enumerate([0.0, 0.0, 1.0, 0.8, 1.0, 0.0][: len(prompts)])
    ]
    options = {"dtype": "float32", "kv_cache_gb": 0.05, "max_model_len": 128, **options}
    with LLM(str(folder), speculative_config=speculative, **options) as llm:
        return said(llm, prompts, params), llm._running().core.stats()


@pytest.mark.parametrize("network", ["torch", *(["native"] if "native" in NETWORKS else [])])
def test_guesses_are_those_of_the_published_loop(folder: Path, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, text = Reference(folder), [5, 90, 33, 41, 7]
    with LLM(str(folder), speculative_config=fixed({"method": "orthrus"}), dtype="float32", kv_cache_gb=0.05, **NETWORKS[network]) as llm:
        proposer = next(p for p in llm._running().core.proposers.proposers if p.name == "orthrus")
        drafted = heard(monkeypatch, proposer)
        llm.generate([text], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), use_tqdm=False)
    assert len(drafted) > 3 and max(len(guesses) for _, guesses in drafted) == BLOCK - 1
    for known, guesses in drafted:
        assert guesses == reference.guesses(known, len(guesses)).argmax(-1).tolist()


@pytest.mark.parametrize("network", NETWORKS)
def test_texts_are_the_targets(folder: Path, network: str) -> None:
    prompts = [[5 + i, 9, 20 + i, *range(40, 45 + 9 * i)] for i in range(6)]
    plain, _ = say(folder, {"method": "off"}, prompts, **NETWORKS[network])
    for more in ({}, {"draft_sample_method": "probabilistic", "num_speculative_tokens": 3}):
        chunked = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
        said, stats = say(folder, fixed({"method": "orthrus", **more}), prompts, **NETWORKS[network], **chunked)
        assert said == plain and stats.num_draft_tokens > 100


def test_a_target_brings_its_guesses_along(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", kv_cache_gb=0.05) as llm:
        engine = llm._running()
        assert engine.proposer_names == ("prediction", "orthrus", "ngram")
        assert "orthrus     the target itself, 18 attention weights exchanged, blocks of 8, mask token 319" in engine.banner
    named, _ = say(folder, fixed({"model": str(folder)}), [[5, 9, 20]])
    assert named == say(folder, {"method": "off"}, [[5, 9, 20]])[0]


@pytest.mark.parametrize(
    ("config", "speculative", "message"),
    [
        ({}, {"num_speculative_tokens": 8}, "'num_speculative_tokens' is 8, but the blocks of .* have 7: lower it"),
        ({"mask_token_id": VOCAB}, {}, "'mask_token_id' must be below 320, not 320"),
        ({"block_size": 1}, {}, "'block_size' must be above 1, not 1"),
        ({"block_size": None}, {}, "'block_size' must be an integer"),
        ({}, {"model": "elsewhere"}, "'model' 'elsewhere' is not the target"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], speculative: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        LLM(str(save(tmp_path, **config)), speculative_config={"method": "orthrus", **speculative}, kv_cache_gb=0.05)


@pytest.mark.parametrize("message", LACKING)
def test_a_view_that_lacks_something_is_refused_and_left_out_where_nobody_asked(message: str, tmp_path: Path) -> None:
    folder = str(changed(save(tmp_path), LACKING[message]))
    with pytest.raises(ConfigError, match=message):
        LLM(folder, speculative_config={"method": "orthrus"}, kv_cache_gb=0.05)
    with LLM(folder, kv_cache_gb=0.05) as llm:
        assert llm._running().proposer_names == ("prediction", "ngram")


def test_names_may_lack_the_model_around_them(folder: Path, tmp_path: Path) -> None:
    bare = changed(save(tmp_path), lambda weights: {name.removeprefix("model."): tensor for name, tensor in weights.items()})
    assert [method.name for method in find_methods(str(bare), None)][-1] == "orthrus"
    speculative = fixed({"method": "orthrus"})
    assert say(bare, speculative, [[5, 9, 20]])[1].num_draft_tokens == say(folder, speculative, [[5, 9, 20]])[1].num_draft_tokens
