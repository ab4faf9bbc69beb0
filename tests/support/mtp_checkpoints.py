"""Tiny targets with MTP layers in every published layout, and what those layers guess, recomputed from the text by other code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import (
    Ernie4_5_MoeDecoderLayer,
    Ernie4_5_MoeRMSNorm,
    Ernie4_5_MoeRotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, Qwen3_5MoeTextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm, Qwen3NextRotaryEmbedding

from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.kernels.program import Program
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
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def _mimo() -> Any:
    announced: dict[str, Any] = {"num_key_value_heads": 2, "num_nextn_predict_layers": 1}
    return transformers.Qwen2Config(**_SIZES, **announced)


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 32,
}


def _deepseek() -> Any:
    stretched = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 128}
    rope = {**stretched, "mscale": 0.7, "mscale_all_dim": 1.1}
    return transformers.DeepseekV3Config(**_SIZES, **_EXPERTS, **_LATENT, n_group=2, topk_group=1, rope_parameters=rope)


def _glm_flash() -> Any:
    experts = {name: number for name, number in _EXPERTS.items() if name != "first_k_dense_replace"}
    return transformers.Glm4MoeLiteConfig(**_SIZES, **experts, **_LATENT, rope_interleave=False)


def _glm() -> Any:
    heads: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}
    return transformers.Glm4MoeConfig(**_SIZES, **_EXPERTS, **heads)


def _ernie() -> Any:
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1, "num_nextn_predict_layers": 1}
    return transformers.Ernie4_5_MoeConfig(**_SIZES, **experts, num_key_value_heads=2)  # pyright: ignore[reportArgumentType]


def _gated(config: type[Any], **settings: Any) -> Callable[[], Any]:
    """A Qwen since Qwen3-Next: its target has a layer with recurrent state, its MTP layer has attention."""
    delta: dict[str, Any] = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        "mtp_num_hidden_layers": 1,
    }
    sizes = _SIZES if "shared_expert_intermediate_size" not in settings else {k: v for k, v in _SIZES.items() if k != "intermediate_size"}
    return lambda: config(**sizes, **delta, **settings)


_SHARED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}

CONFIGS: dict[str, Callable[[], Any]] = {"mimo": _mimo, "deepseek": _deepseek, "glm": _glm, "glm_flash": _glm_flash, "ernie": _ernie}
GATED: dict[str, Callable[[], Any]] = {
    "qwen3_next": _gated(transformers.Qwen3NextConfig, **_SHARED),
    "qwen3_5": _gated(transformers.Qwen3_5TextConfig),
    "qwen3_5_moe": _gated(transformers.Qwen3_5MoeTextConfig, **_SHARED),
}
_LAYERS: dict[str, tuple[type[Any], type[Any], type[Any]]] = {  # layer, norm, rotary table
    "qwen3_next": (Qwen3NextDecoderLayer, Qwen3NextRMSNorm, Qwen3NextRotaryEmbedding),
    "qwen3_5": (Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding),
    "qwen3_5_moe": (Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, Qwen3_5MoeTextRotaryEmbedding),
}


@dataclass
class MtpTarget(ReferencedDrafter):
    """A target on disk with its MTP layer. As PretendedEngine's target it has states that depend on the whole text."""

    name: str
    folder: Path
    hf_config: Any
    after: Scores
    head: Tensor

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
        network: Any = load_program_executor([self.folder / "model.safetensors"], self.hf_config, execution)

        def bind(program: Program, weights: Mapping[str, Tensor], quantization: str | None) -> Executor:
            return bind_program(program, weights, execution, network.bank)

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
    if name in GATED:
        layers = _gated_layer(name, hf_config, fused=name != "qwen3_next")
    else:
        layers = {"mimo": _mimo_layer, "ernie": _ernie_layer}.get(name, lambda config: _layer_behind(config, tensors))(hf_config)
    save_file({**{k: v.clone() for k, v in tensors.items()}, **layers}, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(folder)
    if name in GATED:
        after = _gated_reference(name, hf_config, layers, model)
    elif name == "ernie":
        hf_config._attn_implementation = "eager"
        layer = Ernie4_5_MoeDecoderLayer(hf_config, 0).eval()
        layer.load_state_dict({key: layers[f"model.mtp_block.0.{key}"] for key in layer.state_dict()})
        names = "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", ""
        after = _scores(hf_config, model, layer, Ernie4_5_MoeRotaryEmbedding(hf_config), Ernie4_5_MoeRMSNorm, layers, names)
    else:
        after = _mimo_reference(hf_config, layers, model) if name == "mimo" else _transformers_reference(model, folder)
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


def _mimo_layer(hf_config: Any) -> dict[str, Tensor]:
    shapes = {name: tuple(tensor.shape) for name, tensor in Qwen2DecoderLayer(hf_config, 0).state_dict().items()}
    norms = {f"{norm}.weight": (HIDDEN,) for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    shapes |= norms | {"input_proj.weight": (HIDDEN, 2 * HIDDEN)}
    return {f"model.mtp_layers.0.{name}": _random(shape, name) for name, shape in shapes.items()}


def _ernie_layer(hf_config: Any) -> dict[str, Tensor]:
    shapes = {f"block.0.{name}": tuple(tensor.shape) for name, tensor in Ernie4_5_MoeDecoderLayer(hf_config, 0).state_dict().items()}
    shapes |= {"emb_norm.0.weight": (HIDDEN,), "hidden_norm.0.weight": (HIDDEN,), "linear_proj.0.weight": (HIDDEN, 2 * HIDDEN)}
    return {f"model.mtp_{name}": _random(shape, name) for name, shape in shapes.items()}


def _gated_layer(name: str, hf_config: Any, fused: bool) -> dict[str, Tensor]:
    """As Qwen publishes it. fused: experts are in two tensors, as Qwen3.5's, or in a tensor each, as Qwen3-Next's."""
    shapes = {key: tuple(tensor.shape) for key, tensor in _LAYERS[name][0](_one_layer(hf_config), 0).state_dict().items()}
    layer = {f"mtp.layers.0.{key}": _random(shape, key) for key, shape in shapes.items()}
    if not fused:
        block = "mtp.layers.0.mlp.experts."
        for expert, (both, down) in enumerate(zip(layer.pop(f"{block}gate_up_proj"), layer.pop(f"{block}down_proj"), strict=True)):
            gate, up = both.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            layer |= {f"{block}{expert}.{part}.weight": tensor.clone() for part, tensor in parts.items()}
    norms = {f"mtp.{norm}.weight": (HIDDEN,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return layer | {key: _random(shape, key) for key, shape in (norms | {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}).items()}


def _one_layer(hf_config: Any) -> Any:
    one = copy.deepcopy(hf_config)
    one.layer_types, one._attn_implementation = ["full_attention"], "eager"
    return one


def _layer_behind(hf_config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As DeepSeek and GLM publish it: a layer like the last one, the parts that join two states, and copies of embedding and head."""
    count = int(hf_config.num_hidden_layers)
    last, prefix = f"model.layers.{count - 1}.", f"model.layers.{count}."
    shapes = {name.removeprefix(last): tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(last)}
    assert any(name.startswith("mlp.experts.0.") for name in shapes), "experts are saved one by one"
    shapes |= {f"{norm}.weight": (HIDDEN,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    shapes["eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    layer = {prefix + name: _random(shape, name) for name, shape in shapes.items()}
    layer[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    layer[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return layer


def _scores(
    hf_config: Any, model: Any, layer: Any, rotary: Any, norm_class: Any, weights: Mapping[str, Tensor], names: Sequence[str]
) -> Scores:
    """Written out over a layer of transformers. names: of both norms before the projection in its order, of that, the last norm's or ""."""
    *norms, projection, last = names

    def norm(name: str, x: Tensor) -> Tensor:
        module = norm_class(HIDDEN, eps=hf_config.rms_norm_eps)
        module.load_state_dict({"weight": weights[f"{name}.weight"]})
        return module(x)

    def after(tokens: Sequence[int], states: Tensor) -> Tensor:
        embedded = model.get_input_embeddings()(torch.tensor(list(tokens)))
        pair = torch.cat([norm(name, states if "hidden" in name else embedded) for name in norms], -1)
        x = (pair @ weights[f"{projection}.weight"].T)[None]
        positions = torch.arange(1, len(tokens) + 1)[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        output = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary(x, positions))
        return norm(last, output[0]) if last else output[0]

    return after


def _mimo_reference(hf_config: Any, layers: Mapping[str, Tensor], model: Any) -> Scores:
    weights = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in layers.items()}
    hf_config._attn_implementation = "eager"
    layer = Qwen2DecoderLayer(hf_config, 0).eval()
    layer.load_state_dict({name: weights[name] for name in layer.state_dict()})
    names = "hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm"
    return _scores(hf_config, model, layer, Qwen2RotaryEmbedding(hf_config), Qwen2RMSNorm, weights, names)


def _gated_reference(name: str, hf_config: Any, layers: Mapping[str, Tensor], model: Any) -> Scores:
    layer_class, norm_class, rotary_class = _LAYERS[name]
    layer = layer_class(_one_layer(hf_config), 0).eval()
    weights = {key.removeprefix("mtp."): tensor for key, tensor in layers.items()}
    own = {key.removeprefix("layers.0."): tensor for key, tensor in weights.items() if key.startswith("layers.0.")}
    if "mlp.experts.0.up_proj.weight" in own:
        parts = [[own[f"mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")] for expert in range(4)]
        own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
        own["mlp.experts.down_proj"] = torch.stack([down for *_, down in parts])
    layer.load_state_dict({key: own[key] for key in layer.state_dict()})
    names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    return _scores(hf_config, model, layer, rotary_class(hf_config), norm_class, weights, names)


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
