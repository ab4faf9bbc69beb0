"""Tiny targets with MTP layers in every published layout, and what those layers guess, recomputed from the text by other code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
import transformers
from compared_guesses import ReferencedDrafter
from pretended_engine import TORCH, Guess
from safetensors.torch import load_file, save_file
from target_views import a_view
from tiny_models import save_tokenizer
from torch import Tensor
from transformers.modeling_layers import MtpModel

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.kernels.program import Program
from foretoken.kernels.stored_tensors import read_tensors
from foretoken.kernels.weights import bind_program, load_program_executor
from foretoken.proposers import mtp
from foretoken.proposers.config import MtpConfig
from foretoken.proposers.loading import LoadedProposer, Resources, TargetView

HIDDEN = 32
MAX_MODEL_LEN = 512
Scores = Callable[[Sequence[int], Tensor], Tensor]
"""(tokens of positions 1, 2, ..., the state beside each [n, HIDDEN]) -> states [n, HIDDEN] behind the norm."""

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-3,  # large enough to show
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}
_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 32,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7, "mscale_all_dim": 1.1,
}
_SPACE: dict[str, Any] = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}


def _family(config: type[Any], **settings: Any) -> Callable[[], Any]:
    return lambda: config(**_SIZES, **copy.deepcopy(settings))


def _gated(config: type[Any], **settings: Any) -> Callable[[], Any]:
    """A Qwen since Qwen3-Next: its target has a layer with recurrent state, its MTP layer has attention."""
    delta: dict[str, Any] = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    }
    sizes = _SIZES if "shared_expert_intermediate_size" not in settings else {k: v for k, v in _SIZES.items() if k != "intermediate_size"}
    return lambda: config(**sizes, **_HEADS, **delta, **settings)


_SHARED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}

CONFIGS: dict[str, Callable[[], Any]] = {
    "mimo": _family(transformers.Qwen2Config, num_key_value_heads=2, num_nextn_predict_layers=1),
    "deepseek": _family(transformers.DeepseekV3Config, **_EXPERTS, **_LATENT, n_group=2, topk_group=1, rope_parameters=_YARN),
    "glm": _family(transformers.Glm4MoeConfig, **_EXPERTS, **_HEADS, use_qk_norm=True, attention_bias=True),
    "glm_flash": _family(
        transformers.Glm4MoeLiteConfig, **{name: number for name, number in _EXPERTS.items() if name != "first_k_dense_replace"},
        **_LATENT, rope_interleave=False,
    ),
    "ernie": _family(
        transformers.Ernie4_5_MoeConfig, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, num_nextn_predict_layers=1,
        num_key_value_heads=2, moe_layer_start_index=1, moe_layer_end_index=1,
    ),
    "hunyuan": _family(transformers.HYV3Config, **_EXPERTS, **_HEADS, attention_bias=True, num_experts=4, router_scaling_factor=1.5),
    "exaone": _family(
        transformers.ExaoneMoeConfig, **_EXPERTS, layer_types=["sliding_attention", "full_attention"], sliding_window=5, num_experts=4,
        num_key_value_heads=2,
    ),
    "nemotron": _family(
        transformers.NemotronHConfig, **_EXPERTS, **_SPACE, **_HEADS, layer_types=["linear_attention", "full_attention", "moe"],
        layer_norm_epsilon=1e-3, moe_shared_expert_intermediate_size=24, moe_latent_size=24, routed_scaling_factor=1.5,
    ),
}
GATED: dict[str, Callable[[], Any]] = {
    "qwen3_next": _gated(transformers.Qwen3NextConfig, **_SHARED),
    "qwen3_5": _gated(transformers.Qwen3_5TextConfig),
    "qwen3_5_moe": _gated(transformers.Qwen3_5MoeTextConfig, **_SHARED),
}
_JOINING = ("enorm", "hnorm", "eh_proj")
_NUMBERED = ({"model.layers.2.": 1}, [f"model.layers.2.{part}" for part in (*_JOINING, "shared_head.norm")])
_GATED = ({"mtp.layers.0.": 1}, [f"mtp.{part}" for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")])
_MODULES: dict[str, tuple[dict[str, int], Sequence[str]]] = {
    **dict.fromkeys(GATED, _GATED),
    "mimo": (
        {"model.mtp_layers.0.": 0},
        [f"model.mtp_layers.0.{part}" for part in ("hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm")],
    ),
    "ernie": ({"model.mtp_block.0.": 0}, [*(f"model.mtp_{part}.0" for part in ("emb_norm", "hidden_norm", "linear_proj")), ""]),
    "hunyuan": ({"model.layers.2.": 1}, [f"model.layers.2.{part}" for part in (*_JOINING, "final_layernorm")]),
    "exaone": ({"mtp.layers.0.": 0}, _GATED[1]),
    "nemotron": (
        {"mtp.layers.0.": 1, "mtp.layers.1.": 2},
        [*(f"mtp.layers.0.{part}" for part in _JOINING), "mtp.layers.1.final_layernorm"],
    ),
    **{"deepseek": _NUMBERED, "glm": _NUMBERED, "glm_flash": _NUMBERED},
}
"""What begins the names of a module's layers, and which of the target's each is like; then both norms before the projection in its
order, that, and the last norm or ""."""


@dataclass
class MtpTarget(ReferencedDrafter):
    """A target on disk with its MTP layer. As PretendedEngine's target it has states that depend on the whole text."""

    name: str
    folder: Path
    hf_config: Any
    after: Scores
    head: Tensor
    bound: list[Executor] = field(default_factory=list)

    @property
    def target(self) -> MtpTarget:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    def state(self, text: Sequence[int], boundary: int) -> Tensor:
        return _state(tuple(text), boundary)

    def probs(self, guess: Guess, first: int = 0) -> Tensor:
        """One module, whose own state behind the norm is fed back for each guess."""
        assert first == 0
        tokens, found = guess.text[1:], list[Tensor]()
        states = torch.stack([self.state(guess.text[: i + 1], -1) for i in range(len(tokens))])
        with torch.no_grad():
            for token in guess.tokens:
                output = self.after(tokens, states)[-1:]
                found.append((output[0] @ self.head.T).softmax(-1))
                tokens, states = [*tokens, token], torch.cat([states, output])
        return torch.stack(found)

    def load(self, execution: Execution = TORCH, **settings: Any) -> LoadedProposer:
        network: Any = load_program_executor(read_tensors([self.folder / "model.safetensors"]), self.hf_config, execution)

        def bind(program: Program, weights: Mapping[str, Tensor], quantization: str | None) -> Executor:
            self.bound.append(bind_program(program, weights, execution, network.bank))
            return self.bound[-1]

        find: Any = lambda name, _: Path(name)  # noqa: E731
        return mtp.load(MtpConfig(**settings), Resources(self.view(), find, bind, cast(Any, None)))

    def view(self) -> TargetView:
        config = self.hf_config
        sizes = {"num_layers": config.num_hidden_layers, "hidden_size": HIDDEN, "vocab_size": config.vocab_size}
        return a_view(folder=self.folder, config=config.to_dict(), max_model_len=MAX_MODEL_LEN, **sizes)


def write(name: str, folder: Path) -> MtpTarget:
    """A random target of this family and its MTP layer, in one file, with a tokenizer."""
    hf_config = {**CONFIGS, **GATED}[name]()
    folder.mkdir(exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(hf_config).float().eval()
        model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    places, around = _MODULES[name]
    stem = next(key for key in tensors if ".layers." in key).partition("layers.")[0] + "layers."
    shapes = {f"{part}.weight": (HIDDEN,) for part in around if part} | {f"{around[2]}.weight": (HIDDEN, 2 * HIDDEN)}
    for place, like in places.items():
        like = f"{stem}{like}."
        shapes |= {place + key.removeprefix(like): tuple(tensor.shape) for key, tensor in tensors.items() if key.startswith(like)}
    layers = {key: _random(shape, key) for key, shape in shapes.items()}
    if name == "qwen3_5_moe":  # its experts are published in two tensors
        block = "mtp.layers.0.mlp.experts."
        parts = [[layers.pop(f"{block}{i}.{part}_proj.weight") for part in ("gate", "up", "down")] for i in range(4)]
        layers[f"{block}gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
        layers[f"{block}down_proj"] = torch.stack([down for *_, down in parts])
    if "model.layers.2." in places:
        layers["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        layers["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**{k: v.clone() for k, v in tensors.items()}, **layers}, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(folder)
    if name in ("deepseek", "glm", "glm_flash"):
        after = _transformers_reference(model, folder)
    else:
        after = _written_out(name, hf_config, {**tensors, **layers}, model, stem)
    return MtpTarget(name, folder, hf_config, after, tensors["lm_head.weight"])


def edit(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **settings: Any) -> None:
    """Rewrite the tensors and the settings of a folder."""
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file(change({name: tensor.clone() for name, tensor in load_file(file).items()}), file, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))


@cache
def _state(text: tuple[int, ...], boundary: int) -> Tensor:
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(hash((text, boundary)) % 2**40))


def _random(shape: tuple[int, ...], name: str) -> Tensor:
    """Norms are random too, so that nothing can be forgotten unnoticed."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
    return 1 + 0.3 * noise if "norm" in name else noise * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)


def _written_out(name: str, hf_config: Any, weights: Mapping[str, Tensor], model: Any, stem: str) -> Scores:
    """Over layers of transformers, which reads them as if they were the target's next ones. stem: before a layer's number."""
    places, (*norms, projection, last) = _MODULES[name]
    config, count = copy.deepcopy(hf_config), int(hf_config.num_hidden_layers)
    for setting in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(config, setting, None):
            setattr(config, setting, [*kinds, *(kinds[like] for like in places.values())])
    config.num_hidden_layers = count + len(places)
    for i, place in enumerate(places):
        weights = {**weights, **{key.replace(place, f"{stem}{count + i}."): weights[key] for key in weights if key.startswith(place)}}
    longer, info = type(model).from_pretrained(
        None, config=config, state_dict={**weights}, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    layers = longer.eval().model.layers[count:]
    norm_class = next(type(part) for part_name, part in layers.named_modules() if part_name.endswith("norm"))
    rotary = getattr(longer.model, "rotary_emb", lambda *_: None)

    def norm(part: str, x: Tensor) -> Tensor:
        module = norm_class(HIDDEN, eps=_SIZES["rms_norm_eps"])
        module.load_state_dict({"weight": weights[f"{part}.weight"]})
        return module(x)

    def after(tokens: Sequence[int], states: Tensor) -> Tensor:
        embedded = model.get_input_embeddings()(torch.tensor(list(tokens)))
        pair = torch.cat([norm(part, states if "hidden" in part or "hnorm" in part else embedded) for part in norms], -1)
        x = (pair @ weights[f"{projection}.weight"].T)[None]
        positions = torch.arange(1, len(tokens) + 1)[None]
        unseen = torch.full((len(tokens), len(tokens)), -torch.inf)
        mask = (unseen.triu(1) + unseen.tril(-(getattr(hf_config, "sliding_window", None) or MAX_MODEL_LEN)))[None, None]
        for layer in layers:
            x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary(x, positions))
        return norm(last, x[0]) if last else x[0]

    return after


def _transformers_reference(model: Any, folder: Path) -> Scores:
    """transformers' own MTP model, which reads the same file."""
    model.config.name_or_path, model.config.dtype = str(folder), torch.float32
    if not hasattr(model.config, "num_mtp_layers"):  # transformers knows no MTP layers of GLM-4.7-Flash
        model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = 1, ["sparse"]
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    model.set_attn_implementation("eager")
    reference: Any = MtpModel.from_pretrained(model)
    reference.eval()

    def after(tokens: Sequence[int], states: Tensor) -> Tensor:
        positions = torch.arange(1, len(tokens) + 1)[None]
        return reference.forward_layer(0, states[None], positions, None, input_ids=torch.tensor([list(tokens)]))[0]

    return after
