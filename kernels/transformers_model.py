"""Any causal language model of transformers as an executor: its own forward, with our attention and our cache.

One attention function is registered with transformers. The pass travels as a keyword through the model's forward to every
attention layer; since no mask function is registered under that name, transformers builds no mask. Whether a model really
works that way is found out once, by running it: see `TransformersExecutor`. Knows no requests and no tokenizer.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .adapters import AdapterBank, AdapterRoom, Factors, slots_of_tokens
from .attention import AttentionPlan, paged_attention
from .chain import run_chain_by_steps
from .config_limits import cannot_be_taken_back, entry, max_positions, refuse_layers, servable_positions
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
from .weight_bank import WeightBank

ATTENTION = "foretoken_paged"
PROBE_TOKENS = 8

# Largest difference between the probe's logits with our attention and with the model's own, relative to their norm.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass
class PagedPass:
    """One forward on its way through the attention layers."""

    kv: TorchKV
    plan: AttentionPlan
    num_layers_seen: int = 0  # layers call in order, so the count is the layer's index


@dataclass
class PagedProbe:
    """A pass of fresh prompts that needs no cache yet and writes down what the layers ask of it."""

    batch: RaggedBatch
    layers: list[KVLayerSpec] = field(default_factory=list)


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, k_dim]
    key: Tensor,  # [1, kv_heads, T, k_dim]
    value: Tensor,  # [1, kv_heads, T, v_dim]
    attention_mask: Tensor | None,
    foretoken_pass: PagedPass | PagedProbe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H] sinks
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each attention layer; returns [1, T, H, v_dim]."""
    for name in ("position_bias", "alibi"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"its attention uses {name!r}, which the paged attention does not know")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(foretoken_pass, PagedProbe):
        probe, layer = foretoken_pass, 0
        spec = KVLayerSpec(k.shape[1], k.shape[2], v.shape[2], sliding_window)
        probe.layers.append(spec)
        kv, plan = TorchKV((spec,), len(probe.batch.seq_lens), probe.batch.block_size, k.dtype, k.device), AttentionPlan(probe.batch)
    else:
        layer = foretoken_pass.num_layers_seen
        foretoken_pass.num_layers_seen += 1
        kv, plan = foretoken_pass.kv, foretoken_pass.plan
    sinks = None if s_aux is None else s_aux.float()
    return paged_attention(q, k, v, kv, layer, plan, scale, sliding_window, softcap, sinks)[None], None


transformers.AttentionInterface.register(ATTENTION, _attention)


class TransformersExecutor(HasNoStates):
    """Runs a transformers causal LM, already loaded with attn_implementation="foretoken_paged".

    Construction proves that the model is served right: a probe prompt must reach our attention once per attention layer, and
    its logits must be those of the model's own attention. Raises UnsupportedModel otherwise.
    """

    def __init__(self, model: transformers.PreTrainedModel, room: AdapterRoom | None = None) -> None:
        refuse_unsupported(model.config)
        self._model = model.eval()
        self._config = model.config.get_text_config()
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.dtype = model.dtype
        self.is_batch_invariant = False
        self.recurrent: tuple[str, int] | None = None
        self.token_ids: Tensor | None = None
        self.bank = _bank(self._model)
        self.adapters = None if room is None else self._with_adapters(room)
        self._slots: Tensor | None = None  # of the pass that runs, as `slots_of_tokens` has them
        self.weight_bytes = sum(weight.nbytes for weight in model.parameters())  # an embedding of its own included
        self.max_model_len = servable_positions(model.config)
        self.kv_layers, self.vocab_size, self._gives_hidden = self._probe()

    @classmethod
    def load(
        cls,
        folder: Path,
        hf_config: transformers.PretrainedConfig,
        dtype: torch.dtype,
        room: AdapterRoom | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> TransformersExecutor:
        """Read the safetensors of a local folder. room: for adapters of its linear layers. tensors: what to take instead of the files.

        Raises UnsupportedModel, also if weights of the network are missing.
        """
        refuse_unsupported(hf_config)
        try:
            loaded: Any = _without_draft_layers(hf_config).from_pretrained(
                folder if tensors is None else None,
                config=hf_config,
                state_dict=None if tensors is None else {name: tensor.to(dtype) for name, tensor in tensors.items()},
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:  # what model classes raise over odd settings
            if error.args == (ATTENTION,):  # looked up among attentions of the family's own
                message = f"a {hf_config.model_type!r} model cannot be served: in transformers its attention cannot be replaced by another"
                raise UnsupportedModel(message) from error
            told = f"{type(error).__name__}: {error}"
            raise UnsupportedModel(f"transformers cannot make a model of {folder}/config.json ({told}); correct its settings") from error
        model, report = loaded
        # transformers would fill these with random numbers and go on.
        absent = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
        if absent:
            raise UnsupportedModel(
                f"{len(absent)} weights of the network are missing or have another shape in {folder}, the first is {absent[0]!r}"
            )
        return cls(model, room)

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> TorchKV:
        return TorchKV(self.kv_layers, num_blocks, block_size, self.dtype, self._model.device)

    def kv_block_bytes(self, block_size: int) -> int:
        return kv_bytes_per_block(self.kv_layers, block_size, self.dtype)

    def check_hidden(self, hidden: tuple[int, ...]) -> None:
        """Raises UnsupportedModel if the model gives no states of one of these boundaries."""
        if hidden and not (self._gives_hidden and max(hidden) < len(self.kv_layers)):
            raise UnsupportedModel(
                f"a {self._config.model_type!r} model that transformers runs does not give the hidden states {hidden}: "
                f"of its {len(self.kv_layers)} layers there are the inputs, and what stands behind the final norm ({FINAL})"
            )

    @torch.no_grad()
    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        """One pass; see `Executor.run`. Raises UnsupportedModel if the model gives no hidden states of that boundary.

        The last layer's output is never among them: transformers gives it behind the final norm only.
        """
        assert isinstance(kv, TorchKV) and not inputs, "a whole model reads tokens only"
        self.check_hidden(hidden)
        self._slots = slots_of_tokens(batch)
        output = self._forward(batch, PagedPass(kv, AttentionPlan(batch)), bool(hidden))
        logits = self._logits(output, batch)
        top, argmax = logits.max(-1)
        full = logits[batch.full_logits].float() if len(batch.full_logits) else None
        states = {boundary: output.hidden_states[boundary][0] for boundary in hidden}  # FINAL is the last one
        return ForwardOutput(argmax, top.float(), full, states)

    def run_chain(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        counts: Tensor,
        draws: Draws | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> ChainOutput:
        return run_chain_by_steps(self, batch, kv, counts, draws, inputs)

    def _with_adapters(self, room: AdapterRoom) -> AdapterBank:
        """Let every linear layer but the head add what the adapters of its rows do."""
        head = self._model.get_output_embeddings()
        every = ((name, layer) for name, layer in self._model.named_modules() if type(layer) is nn.Linear and "expert" not in name)
        layers = {name: layer for name, layer in every if layer is not head}
        shapes = {f"{name}.weight": (layer.out_features, layer.in_features) for name, layer in layers.items()}
        bank = AdapterBank([(name,) for name in shapes], shapes, room, self.dtype, self._model.device)
        for name, layer in layers.items():
            factors = bank.factors[(f"{name}.weight",)]

            def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, factors: Factors = factors) -> Tensor | None:
                if self._slots is None:
                    return None
                rows = inputs[0].reshape(-1, inputs[0].shape[-1])
                if len(rows) != len(self._slots):
                    raise UnsupportedModel("a linear layer that does not see every token once cannot have an adapter")
                return output + factors.added(rows, self._slots).view(output.shape)

            layer.register_forward_hook(add)
        return bank

    def _forward(self, batch: RaggedBatch, foretoken_pass: PagedPass | PagedProbe | None, hidden: bool) -> Any:
        arguments: dict[str, Any] = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None]}
        if self._selects_logits:
            arguments["logits_to_keep"] = batch.logits_indices
        if foretoken_pass is not None:
            arguments["foretoken_pass"] = foretoken_pass
        return self._model(**arguments, use_cache=False, output_hidden_states=hidden, return_dict=True)

    def _logits(self, output: Any, batch: RaggedBatch) -> Tensor:
        """[N, V] of logits_indices, with whatever scaling and capping the model puts behind its head."""
        logits: Tensor = output.logits[0]
        return logits if self._selects_logits else logits[batch.logits_indices]

    @torch.no_grad()
    def _probe(self) -> tuple[tuple[KVLayerSpec, ...], int, bool]:
        """Cache layers, width of the logits, and whether all boundary states come out."""
        kind, num_layers = self._config.model_type, int(self._config.num_hidden_layers)
        tokens = [(31 * i + 7) % int(self._config.vocab_size) for i in range(PROBE_TOKENS)]
        first, second = tokens[:3], tokens[3:]
        # Two rows: a model that ignored the positions it is given, or mixed the rows, would get the second one wrong.
        batch, alone = (fresh_prompts(rows, self._model.device) for rows in ([first, second], [second]))
        probe = PagedProbe(batch)
        self._model.set_attn_implementation(ATTENTION)
        try:
            output = self._forward(batch, probe, hidden=True)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"a {kind!r} model cannot be served: {error}") from error
        except TypeError as error:
            raise UnsupportedModel(f"a {kind!r} model cannot be served: its forward takes no extra keywords ({error})") from error
        if len(probe.layers) != num_layers:
            raise UnsupportedModel(
                f"a {kind!r} model cannot be served: {len(probe.layers)} of its {num_layers} layers used the paged attention"
            )
        _check_windows(self._config, probe.layers)

        logits = self._logits(output, batch)[len(first) :].float()
        self._model.set_attn_implementation("eager")
        own = self._logits(self._forward(alone, None, hidden=False), alone).float()
        self._model.set_attn_implementation(ATTENTION)
        difference = float((logits - own).norm() / own.norm().clamp_min(1e-9))
        if not difference <= PROBE_TOLERANCE.get(self.dtype, 0.1):
            raise UnsupportedModel(
                f"a {kind!r} model cannot be served: with the paged attention its logits differ by {difference:.1%} from its own"
            )
        hidden_states = output.get("hidden_states") or ()
        gives_hidden = len(hidden_states) == num_layers + 1 and all(state.shape[:2] == (1, PROBE_TOKENS) for state in hidden_states)
        return tuple(probe.layers), logits.shape[-1], gives_hidden


def _without_draft_layers(hf_config: transformers.PretrainedConfig) -> Any:
    """The class to load, told that draft layers (MTP) behind the last layer are not its own: else it lists them all as unexpected.

    transformers itself names these layers for the published sizes of a family only.
    """
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    config = hf_config.get_text_config()
    first, count = config.num_hidden_layers, entry(config, "num_nextn_predict_layers") or 0
    if not count:
        return model_class
    ignored = [*(model_class._keys_to_ignore_on_load_unexpected or ()), *(rf"^model\.layers\.{first + i}\." for i in range(count))]
    return type(model_class.__name__, (model_class,), {"_keys_to_ignore_on_load_unexpected": ignored, "__module__": model_class.__module__})


def _bank(model: transformers.PreTrainedModel) -> WeightBank:
    """Its embedding and head under the names that checkpoints give them; drafters share these."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tensors: dict[str, Tensor] = {}
    if isinstance(embedding, nn.Embedding):
        tensors["model.embed_tokens.weight"] = embedding.weight.detach()
    if isinstance(head, nn.Linear):
        tensors["lm_head.weight"] = head.weight.detach()
    return WeightBank(tensors)


assert FINAL == -1  # TransformersExecutor.run indexes hidden_states with it


def refuse_unsupported(hf_config: transformers.PretrainedConfig) -> None:
    """Raise UnsupportedModel for what configuration and network class alone rule out, before any weight is read."""
    refuse_layers(hf_config)
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if model_class._is_stateful:
        raise cannot_be_taken_back(hf_config.model_type, "layers with recurrent state")


def _check_windows(config: transformers.PretrainedConfig, layers: list[KVLayerSpec]) -> None:
    """A sliding window that lives in the model's mask only would be lost with the mask."""
    window = entry(config, "sliding_window")
    every_kind = "sliding_attention" if window and window < max_positions(config) else "full_attention"
    kinds = entry(config, "layer_types") or [every_kind] * len(layers)
    for index, (kind, spec) in enumerate(zip(kinds, layers, strict=True)):
        if kind == "sliding_attention" and spec.window is None:
            raise UnsupportedModel(f"layer {index} of this {config.model_type!r} model does not pass its sliding window on")


def fresh_prompts(token_ids: list[list[int]], device: torch.device) -> RaggedBatch:
    """Fresh prompts of at most PROBE_TOKENS tokens, one block each, with scores for every token."""
    starts = [0, *itertools.accumulate(len(tokens) for tokens in token_ids)]
    positions = torch.tensor([place for tokens in token_ids for place in range(len(tokens))], device=device)
    rows = torch.tensor([row for row, tokens in enumerate(token_ids) for _ in tokens], device=device)
    lengths = torch.tensor([len(tokens) for tokens in token_ids], dtype=torch.int32, device=device)
    every_token = torch.arange(starts[-1], device=device)
    return RaggedBatch(
        token_ids=torch.tensor([token for tokens in token_ids for token in tokens], device=device),
        positions=positions,
        slot_mapping=rows * PROBE_TOKENS + positions,
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=lengths,
        block_tables=torch.arange(len(token_ids), dtype=torch.int32, device=device)[:, None],
        num_causal=lengths,
        tree_mask=torch.zeros_like(every_token),
        logits_indices=every_token,
        full_logits=every_token,
        block_size=PROBE_TOKENS,
    )
