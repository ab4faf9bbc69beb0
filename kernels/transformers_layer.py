"""One draft layer of a transformers family as an executor: a decoder layer of the target's own kind between two states (MTP).

Knows the layout that DeepSeek-V3 publishes, by names without the layer's prefix. Knows no checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from .attention import AttentionPlan
from .chain import run_chain_by_steps
from .config_limits import max_positions
from .layout import (
    FINAL,
    ChainOutput,
    Draws,
    ForwardOutput,
    HasNoStates,
    KVLayerSpec,
    KVTensors,
    RaggedBatch,
    StateRoom,
    kv_bytes_per_block,
)
from .rope import UnsupportedModel
from .torch_kv import TorchKV
from .transformers_model import ATTENTION, PagedPass, PagedProbe, fresh_prompts
from .weight_bank import WeightBank

STATE = "feature"
"""The input buffer [T, hidden size]: of each token, the target's state behind the final norm that predicted it."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_KEPT_WIDE = "e_score_correction_bias"  # added to scores that differ by less than bfloat16 can say


class DraftLayer(nn.Module):
    """o = layer(eh_proj([enorm(E(t_p)); hnorm(f_{p-1})])) at position p; scores are head(shared_head.norm(o)).

    (DeepSeek-AI 2024, section 2.2, with the halves in the order that the published weights want.) Built without numbers:
    `load` gives it some.
    """

    def __init__(self, hf_config: PretrainedConfig) -> None:
        super().__init__()
        config: Any = copy.deepcopy(hf_config.get_text_config())
        if config.model_type != "deepseek_v3":
            raise UnsupportedModel(f"draft layers of model type {config.model_type!r}")
        config._attn_implementation = ATTENTION
        config._experts_implementation = "eager"
        size, eps = int(config.hidden_size), float(config.rms_norm_eps)
        with torch.device("meta"):
            self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(size, eps=eps) for _ in range(3))
            self.eh_proj = nn.Linear(2 * size, size, bias=False)
            self.layer = DeepseekV3DecoderLayer(config, int(config.num_hidden_layers))
        self.rotary = DeepseekV3RotaryEmbedding(config)
        self.config = config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors that `load` wants, by their published names."""
        return {name: shape for _, parts in self._published() for name, shape in parts}

    def load(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        state: dict[str, Tensor] = {}
        for own, parts in self._published():
            given = [tensors[name].to(torch.float32 if own.endswith(_KEPT_WIDE) else dtype, copy=True) for name, _ in parts]
            state[own] = _stacked(own, given) if len(parts) > 1 else given[0]
        own_state = {name: tensor for name, tensor in self.state_dict().items() if name.startswith("rotary.")}
        self.load_state_dict({**state, **own_state}, assign=True)

    def _published(self) -> list[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
        """Own name of each tensor -> names and shapes of the published tensors that it is made of."""
        found: list[tuple[str, list[tuple[str, tuple[int, ...]]]]] = []
        for own, tensor in self.state_dict().items():
            if own.startswith("rotary."):
                continue
            name = "shared_head.norm.weight" if own == "norm.weight" else own.removeprefix("layer.")
            shape = tuple(tensor.shape)
            before, _, expert_part = name.partition("experts.") if name.startswith("mlp.experts.") else (name, "", "")
            match expert_part:
                case "gate_up_proj":
                    count, rows, width = shape
                    gates = [f"{before}experts.{i}.{part}_proj.weight" for i in range(count) for part in ("gate", "up")]
                    found.append((own, [(gate, (rows // 2, width)) for gate in gates]))
                case "down_proj":
                    found.append((own, [(f"{before}experts.{i}.down_proj.weight", shape[1:]) for i in range(shape[0])]))
                case _:
                    found.append((own, [(name, shape)]))
        return found


def _stacked(own: str, parts: list[Tensor]) -> Tensor:
    """Experts one behind the other; gate and up of each are one matrix."""
    if own.endswith("gate_up_proj"):
        parts = [torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return torch.stack(parts)


class TransformersLayerExecutor(HasNoStates):
    """Implements `Executor`. Embedding and head are the target's own, from its bank.

    The state behind the norm is fed back in a chain, as the target's states are read behind theirs.
    """

    def __init__(self, layer: DraftLayer, tensors: Mapping[str, Tensor], dtype: torch.dtype, bank: WeightBank, max_model_len: int) -> None:
        """tensors: by the names and of the shapes of `layer.shapes()`. max_model_len: positions it is to be run with."""
        layer.load(tensors, dtype)
        self._layer = layer.eval().requires_grad_(False)
        self._embedding = bank.tensors[_EMBEDDING]
        self._head = bank.tensors.get(_HEAD, self._embedding)
        self.dtype = dtype
        self.bank = bank
        self.vocab_size = len(self._head)
        self.max_model_len = min(max_model_len, max_positions(layer.config))
        self.is_batch_invariant = False
        self.weight_bytes = sum(weight.nbytes for weight in layer.parameters()) + self._head.nbytes
        self.token_ids: Tensor | None = None
        self.recurrent: tuple[str, int] | None = (STATE, FINAL)
        self.kv_layers: tuple[KVLayerSpec, ...] = self._probe()

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> TorchKV:
        return TorchKV(self.kv_layers, num_blocks, block_size, self.dtype, self._head.device)

    def kv_block_bytes(self, block_size: int) -> int:
        return kv_bytes_per_block(self.kv_layers, block_size, self.dtype)

    @torch.no_grad()
    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        """One pass; see `Executor.run`. inputs: STATE. Boundary 0 is what the layer reads, 1 what it writes."""
        assert isinstance(kv, TorchKV) and inputs is not None
        states = self._forward(batch, inputs[STATE], PagedPass(kv, AttentionPlan(batch)))
        logits = states[FINAL][batch.logits_indices] @ self._head.T
        top, argmax = logits.max(-1)
        full = logits[batch.full_logits].float() if len(batch.full_logits) else None
        return ForwardOutput(argmax, top.float(), full, {boundary: states[boundary] for boundary in hidden})

    def run_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        draws: Draws | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainOutput:
        return run_chain_by_steps(self, batch, kv, counts, draws, inputs)

    def _forward(self, batch: RaggedBatch, states: Tensor, foretoken_pass: PagedPass | PagedProbe) -> dict[int, Tensor]:
        """Boundary id -> [T, hidden size]."""
        layer, positions = self._layer, batch.positions[None]
        embedded = layer.enorm(self._embedding[batch.token_ids])
        # vLLM puts zeros in place of the embedding in the first entry; transformers and SGLang do not, nor does this.
        x = layer.eh_proj(torch.cat([embedded, layer.hnorm(states.to(self.dtype))], -1))
        rotation = layer.rotary(x[None], position_ids=positions)
        output = layer.layer(x[None], position_ids=positions, position_embeddings=rotation, foretoken_pass=foretoken_pass)[0]
        return {0: x, 1: output, FINAL: layer.norm(output)}

    @torch.no_grad()
    def _probe(self) -> tuple[KVLayerSpec, ...]:
        """The cache layer that its attention asks for. Raises UnsupportedModel if ours cannot give it."""
        probe = PagedProbe(fresh_prompts([[0, 0]], self._head.device))
        self._forward(probe.batch, torch.zeros(2, self._head.shape[1], dtype=torch.float32), probe)
        assert len(probe.layers) == 1, "a draft layer has one attention"
        return tuple(probe.layers)
