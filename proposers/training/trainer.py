"""The demonstration models and one training step of both. Owns weights, optimizer and position in the data.

Knows nothing of time or files: how long to train, and what to do meanwhile, is demo_family's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .joint_loss import joint_loss
from .mixture import PackedData, TokenIds
from .schedule import Schedule


@dataclass(frozen=True)
class Shape:
    """Size of one Llama model; the head has the embedding's weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int

    def build(self, vocab_size: int) -> LlamaForCausalLM:
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,          # <|im_end|>, see tokenizer.SPECIAL_TOKENS
            pad_token_id=3,
        ))


TARGET = Shape(hidden=256, layers=8, heads=4, kv_heads=2, intermediate=688)      # 7.9M parameters
DRAFT = Shape(hidden=96, layers=2, heads=3, kv_heads=3, intermediate=256)        # 1.0M parameters


@dataclass(frozen=True)
class Recipe:
    """What decides the weights that come out. Change it and an old checkpoint no longer fits."""

    target: Shape = TARGET
    draft: Shape = DRAFT
    vocab_size: int = 8192
    tokens: int = 20_000_000
    batch_tokens: int = 2048
    sequence: int = 512
    long_sequences: tuple[int, ...] = (1024, 1024, 1024, 2048)   # in turn in the cool-down: all positions are seen
    target_lr: float = 1.5e-3
    draft_lr: float = 2.5e-3
    warmup_tokens: int = 400_000
    weight_decay: float = 0.05
    distillation: float = 0.7
    workers: int = 2                 # parts of a batch, computed side by side
    seed: int = 0
    half: bool = True                # bfloat16 autocast; weights and optimizer stay float32


@dataclass
class Progress:
    """How far a run is, as stored in its checkpoints."""

    seen: int = 0                    # tokens trained on
    stable_seen: int = 0             # of these, before the cool-down: position in the stable stream
    seconds: float = 0.0             # spent training, over all restarts

    @property
    def cooldown_seen(self) -> int:
        return self.seen - self.stable_seen


class Trainer:
    """Owns both models, the optimizer and the position in the data. Only `step` changes weights, by one batch."""

    def __init__(self, recipe: Recipe, data: PackedData):
        torch.manual_seed(recipe.seed)
        self.recipe, self.data = recipe, data
        self.target = recipe.target.build(len(data.tokenizer))
        self.draft = recipe.draft.build(len(data.tokenizer))
        self.parameters = [*self.target.parameters(), *self.draft.parameters()]
        # Parts of a batch side by side, one thread each, meet once a step. Splitting every operation over the threads
        # instead waits at each of them, which on a machine with other work is most of the time.
        self.pool = ThreadPoolExecutor(recipe.workers)
        self.optimizer = torch.optim.AdamW(
            [*_groups(self.target, recipe.target_lr, recipe), *_groups(self.draft, recipe.draft_lr, recipe)],
            betas=(0.9, 0.97), fused=True,
        )
        self.schedule = Schedule.over(recipe.tokens, recipe.warmup_tokens)
        self.progress = Progress()
        self.cooling = False         # once begun, the cool-down's data stay, even if the end moves away again
        self.finishing = False       # the end was asked for by a finish file; a deadline only brings it nearer

    def step(self) -> tuple[float, float]:
        """Train on one batch; returns the losses of target and draft. Raises if one is not finite."""
        inputs, labels = self.next_batch()
        parts = inputs.chunk(self.recipe.workers), labels.view_as(inputs).chunk(self.recipe.workers)
        results = list(self.pool.map(self.gradients, *parts, [labels.numel()] * len(parts[0])))
        target_loss, draft_loss = (sum(losses) for losses in zip(*(result[0] for result in results), strict=True))
        if not target_loss + draft_loss < float("inf"):
            raise FloatingPointError(f"loss is {target_loss}, {draft_loss} after {self.progress.seen} tokens")

        for parameter, *grads in zip(self.parameters, *(result[1] for result in results), strict=True):
            parameter.grad = torch.stack(grads).sum(0)
        for model in self.models:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * self.schedule.factor(self.progress.seen)
        self.optimizer.step()
        self.progress.seen += labels.numel()
        if not self.cooling:
            self.progress.stable_seen = self.progress.seen
        return target_loss, draft_loss

    def gradients(self, inputs: Tensor, labels: Tensor, count: int) -> tuple[tuple[float, float], list[Tensor]]:
        """Losses, and gradients in the order of `self.parameters`, of one part [b, S] of a batch of `count` tokens."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.half):
            hidden = [
                model.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1) for model in self.models
            ]
        dtype = torch.bfloat16 if self.recipe.half else torch.float32
        heads = [model.lm_head.weight for model in self.models]
        target_hidden, draft_hidden, target_head, draft_head = (x.detach().to(dtype) for x in (*hidden, *heads))
        loss = joint_loss(
            target_hidden, draft_hidden, target_head, draft_head, labels.flatten(), self.recipe.distillation, count)
        hidden_grads = loss.target_hidden_grad.to(hidden[0].dtype), loss.draft_hidden_grad.to(hidden[1].dtype)
        grads = list(torch.autograd.grad(hidden, self.parameters, hidden_grads))
        for head, grad in zip(heads, (loss.target_head_grad, loss.draft_head_grad), strict=True):
            index = next(i for i, parameter in enumerate(self.parameters) if parameter is head)
            grads[index] = grads[index] + grad       # tied: the head is the embedding
        return (loss.target, loss.draft), grads

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs [B, S] and labels [B * S] at the present position; long sequences once the cool-down has begun."""
        self.cooling = self.cooling or self.schedule.cooling(self.progress.seen)
        stream, position, sequence = self.data.stable, self.progress.stable_seen, self.recipe.sequence
        if self.cooling:
            stream, position = self.data.cooldown, self.progress.cooldown_seen
            lengths = self.recipe.long_sequences
            sequence = lengths[position // self.recipe.batch_tokens % len(lengths)]
        window = _window(stream, position, self.recipe.batch_tokens + 1)
        return window[:-1].view(-1, sequence), window[1:]

    @property
    def models(self) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
        return self.target, self.draft

    def state(self) -> dict[str, Any]:
        return {
            "target": self.target.state_dict(),
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
            "tokens": self.recipe.tokens,
            "schedule": vars(self.schedule),
            "cooling": self.cooling,
            "finishing": self.finishing,
            "rng": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken, with this recipe's peak learning rates.

        If the recipe's number of tokens has changed since, it decides anew when training ends.
        """
        self.target.load_state_dict(state["target"])
        self.draft.load_state_dict(state["draft"])
        peaks = [group["peak_lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, peak in zip(self.optimizer.param_groups, peaks, strict=True):
            group["peak_lr"] = peak
        self.progress = Progress(**state["progress"])
        self.cooling = state["cooling"]
        if state["tokens"] == self.recipe.tokens:
            self.schedule, self.finishing = Schedule(**state["schedule"]), state["finishing"]
        torch.set_rng_state(state["rng"])


def _groups(model: LlamaForCausalLM, lr: float, recipe: Recipe) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    parameters = [*model.parameters()]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "peak_lr": lr, "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "peak_lr": lr, "weight_decay": 0.0},
    ]


def _window(stream: TokenIds, position: int, length: int) -> Tensor:
    """`length` tokens from `position` on; the stream begins again at its end."""
    start = position % (len(stream) - length)
    return torch.from_numpy(stream[start:start + length].astype("int64"))
