"""Hydra heads in the published layouts against modules of torch, and in the real engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_k import fixed
from hydra_reference import LAYER, TARGET, Heads
from last_state_runs import save
from native_only import native_only
from pretended_engine import EXECUTIONS, TORCH, Guess, PretendedEngine, accept, at_random, block_size, opened, text
from pretended_target import resources
from safetensors.torch import load_file, save_file
from saying import said
from tiny_models import save_llama

from foretoken import LLM, SamplingParams
from foretoken.kernels.execution import Execution
from foretoken.proposers import hydra
from foretoken.proposers.config import MedusaConfig, StaticTree
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.draft_layers import settings_like

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (0, 3, 1)))
PLUS = {"grounded_heads": True, "hidden_state_offset": 0, "hydra_num_heads": 3, "hydra_num_layers": 4, "hydra_head_arch": "prefix-mlp"}
torch.manual_seed(1)
HEADS = {"Hydra++": Heads(3, 4, plus=True), "Hydra": Heads(3, 2, plus=False)}
CONFIGS = {"Hydra++": PLUS, "Hydra": {}}


def load(folder: Path, name: str, execution: Execution = TORCH, config: Any = (), changed: Any = (), **settings: Any) -> Any:
    """changed: tensors of the file, None = missing."""
    tensors = HEADS[name].state_dict() | dict(changed)
    save(folder, CONFIGS[name] | dict(config), {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None})
    given = resources(TARGET, folder, execution, [])
    return hydra.load(MedusaConfig(str(folder), **settings, method="hydra"), replace(given, target=replace(given.target, config=LAYER)))


def run(folder: Path, name: str, execution: Execution = TORCH, **settings: Any) -> PretendedEngine:
    return PretendedEngine(opened(load(folder, name, execution, **settings), execution), TARGET, block_size(execution))


def check(name: str, guesses: dict[str, Guess], first: int = 0) -> int:
    """Each node has its rank among what may follow its path. Returns how many rows guessed."""
    for guess in guesses.values():
        is_chain = guess.parents == list(range(-1, len(guess.tokens) - 1))
        for node, token in enumerate(guess.tokens):
            rank, before = 0 if is_chain else TREE.paths[node][-1], [guess.tokens[n] for n in guess.path(node)[:-1]]
            best, ids = torch.softmax(HEADS[name].scores(guess.text, before, first), -1).sort(descending=True)
            assert token == ids[rank] and guess.confidence[node] == pytest.approx(float(best[rank]), abs=1e-4)
            assert is_chain or guess.parents[node] == (TREE.paths.index(TREE.paths[node][:-1]) if before else -1)
    return sum(bool(guess.tokens) for guess in guesses.values())


@pytest.mark.parametrize("tree", [None, TREE])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", HEADS)
def test_guesses_are_the_references(name: str, execution: Execution, tree: StaticTree | None, tmp_path: Path) -> None:
    engine = run(tmp_path, name, execution, tree=tree)
    engine.add("a", text(1, 9))
    engine.add("b", text(2, 2))
    checked = 0
    for step in range(7):
        if step == 2:
            engine.add("c", text(3, 14))
        guesses = engine.step(at_random(step) if tree is None else accept(0, step), {"a": 1 + step, "b": 8, "c": 5}, chunk=6)
        assert len(guesses["a"].tokens) in (0, min(1 + step, 8 if tree else 3))
        checked += check(name, guesses)
    assert checked == 5 + 6 + 2


def test_the_prefix_layer_takes_over_blocks_and_starts_anew_behind_dropped_states(tmp_path: Path) -> None:
    copies = [f"hydra_mlp.{head}.{place}.linear.{part}" for head in range(3) for place in (5, 7) for part in ("weight", "bias")]
    engine = run(tmp_path, "Hydra++", changed=dict.fromkeys(copies))  # some files have none
    first = engine.add("a", text(1, 14))
    engine.step(accept(0))
    engine.step(accept(0))
    engine.add("b", text(1, 12) + [33, 34], shared=first.table[:3])
    engine.step(accept(1), ceiling=0)
    assert check("Hydra++", engine.step(accept(2))) == 2
    engine.requests.clear()
    engine.add("c", text(1, 300))
    for _ in range(3):
        engine.step(accept(0), chunk=100, asks=False)
    assert check("Hydra++", engine.step(accept(2)), first=300 - 256) == 1


def test_what_was_found_is_told(tmp_path: Path) -> None:
    assert load(tmp_path, "Hydra++", changed={"strange": torch.ones(2)}, num_heads=2).found == (
        "2 of 3 heads of 4 layers, read the target's last states, through a decoder layer (Hydra++), and the guesses before their own",
        "embedding: the target's, output layers: their own",
        "unused tensors: strange",
    )
    with pytest.raises(SpeculativeConfigError, match="'num_heads' is 4, but .* has 3 Hydra heads"):
        load(tmp_path, "Hydra++", num_heads=4)


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        ({"hydra_head_arch": "cross-attn"}, {}, "Hydra heads with 'hydra_head_arch' 'cross-attn', .* take 'mlp' or 'prefix-mlp'"),
        ({"hydra_head_arch": "mlp"}, {}, "has norms that no known drafter"),
        ({"grounded_heads": False}, {}, "'grounded_heads' False, .* take True"),
        ({"hydra_num_layers": 5}, {}, "head 0 .* has 4 layers, but 'hydra_num_layers' is 5"),
        ({"hydra_num_layers": 0}, {}, "'hydra_num_layers' is"),
        ({"intermediate_size": -1}, {}, "config.json has a size below 1"),
        ({}, {"hydra_mlp.1.1.linear.weight": None}, "head 1 .* has 3 layers"),
        ({}, {"hydra_lm_head.1.1.weight": torch.ones(9, 9)}, "is 9 x 9, but 60 x 32 is needed"),
        ({}, {"hydra_lm_head.1.1.weight": None}, r"no tensor 'hydra_lm_head\.1\.weight'"),
        ({}, {"prefix_embeding_layer.norm.weight": None}, r"no tensor 'prefix_embeding_layer\.norm\.weight'"),
        ({}, {name: None for name in HEADS["Hydra++"].state_dict() if "mlp." in name}, "holds no Hydra heads"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpeculativeConfigError, match=message):
        load(tmp_path, "Hydra++", TORCH, config, changed)


def test_what_a_checkpoint_says_of_its_layer_counts_with_all_that_goes_with_it() -> None:
    target = {"head_dim": 16, "num_attention_heads": 4, "rope_parameters": {"rope_theta": 1e4}, "rms_norm_eps": 1e-5, "vocab_size": 9}
    assert settings_like({}, target) == {key: value for key, value in target.items() if key != "vocab_size"}
    assert settings_like({"rope_theta": 5e5, "num_attention_heads": 8}, target) == {
        **{"rope_theta": 5e5, "num_attention_heads": 8, "rms_norm_eps": 1e-5}
    }


@pytest.mark.parametrize("executor", ["torch", pytest.param("native", marks=native_only)])
@pytest.mark.parametrize("plus", [False, True])
def test_an_engine_says_the_same_and_heads_that_are_right_are_accepted(plus: bool, executor: str, tmp_path: Path) -> None:
    """The target's layers add nothing and its embeddings have the norm's length: a token alone says what comes next."""
    target = save_llama(tmp_path, hidden_size=64, num_layers=2, seed=0)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name == "model.embed_tokens.weight":
            weight.div_(weight.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6))
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    layer = {name: weight for name, weight in weights.items() if plus and name.startswith(("model.layers.0.", "model.norm."))}
    tensors = {f"prefix_embeding_layer.{name.removeprefix('model.')}": weight for name, weight in layer.items()}
    for head in range(3):
        tensors[f"hydra_mlp.{head}.0.linear.weight"] = torch.zeros(64, (2 + head) * 64)
        tensors[f"hydra_mlp.{head}.0.res_connection.weight"] = torch.cat([torch.zeros(64, (1 + head) * 64), torch.eye(64)], 1)
    heads = save(tmp_path / "heads", {"hydra_head_arch": "prefix-mlp" if plus else "mlp"}, tensors)
    options: dict[str, Any] = {"kv_cache_gb": 0.05, "executor": executor, "dtype": "float32", "max_model_len": 128}
    params = [SamplingParams(max_tokens=24, seed=i, temperature=t, ignore_eos=True) for i, t in enumerate((0.0, 0.0, 1.0, 0.7))]
    chain: dict[str, Any] = {"model": str(heads), "draft_sample_method": "probabilistic", "quantization": "none"}
    texts: list[list[Any]] = []
    for config in ({"method": "off"}, fixed(chain), fixed({**chain, "hydra_choices": [[0], [1], [0, 0], [1, 0], [0, 0, 0]]})):
        with LLM(str(target), speculative_config=config, **options) as llm:
            texts.append(said(llm, [[5 + i, 9, 20 + i] for i in range(4)], params))
            stats = llm._running().core.stats()
            assert len(texts) != 2 or stats.num_accepted_tokens == stats.num_draft_tokens > 60
            assert len(texts) != 3 or 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert texts[1] == texts[0] == texts[2]
