"""Hydra heads (Ankner et al. 2024) as modules of torch, with the names of the published files; Hydra++'s layer is transformers' own."""

from collections.abc import Sequence
from typing import Any

import torch
from eagle_reference import FINAL, Spec, Target
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

WIDTH, VOCAB = 32, 60
LAYER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3,
}
TARGET = Target(Spec(hidden=WIDTH, target_hidden=WIDTH, vocab=VOCAB))


class Residual(nn.Module):
    def __init__(self, num_read: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_read * WIDTH, WIDTH)
        self.res_connection = nn.Linear(num_read * WIDTH, WIDTH) if num_read > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


class Heads(nn.Module):
    def __init__(self, num_heads: int, depth: int, plus: bool) -> None:
        super().__init__()
        dropout = [nn.Dropout()] * plus  # which numbers what is behind it
        layers = [[*dropout, Residual(2 + head), *[*dropout, Residual(1)] * (depth - 1)] for head in range(num_heads)]  # one Residual(1)
        self.hydra_mlp = nn.ModuleList(nn.Sequential(*each) for each in layers)
        outputs = [nn.Linear(WIDTH, VOCAB) for _ in layers]
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(*dropout, output) if plus else output for output in outputs)
        self.input_embed_fn = nn.Embedding.from_pretrained(TARGET.embedding)
        self.prefix_embeding_layer = LlamaModel(LlamaConfig(**LAYER, num_hidden_layers=1, initializer_range=0.3)) if plus else None
        self.eval().requires_grad_(False)

    def scores(self, text: Sequence[int], guesses: Sequence[int], first: int = 0) -> Tensor:
        """[VOCAB] of what follows text and guesses. first: states before it are unknown."""
        states = torch.stack([TARGET.state(text[: i + 1], FINAL) for i in range(first, len(text) - 1)])
        if self.prefix_embeding_layer is not None:
            positions = torch.arange(first, len(text) - 1)[None]
            states = self.prefix_embeding_layer(inputs_embeds=states[None], position_ids=positions).last_hidden_state[0]
        embeddings = self.input_embed_fn(torch.tensor([text[-1], *guesses]))
        x = self.hydra_mlp[len(guesses)](torch.cat([states[-1], *embeddings]))
        return self.hydra_lm_head[len(guesses)](x)
