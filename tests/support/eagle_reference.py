"""EAGLE drafters written out plainly: random weights, and guesses by recomputing everything from the text. No cache, no program.

Slots are numbered as the papers do: slot i holds token i + 1 and the state of token i.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from plain_networks import PlainNetwork, RandomWeights, attended, turned
from torch import Tensor

FINAL = -1
HEAD_DEPTH = 3  # layers of a Gumiho's heads


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention."""

    q_rank: int = 12  # 0 = queries have one weight
    rank: int = 16
    plain: int = 6  # dimensions of a head
    turned: int = 8
    values: int = 32
    pairs: bool = True  # dimensions 2 i and 2 i + 1 turn together, else i and i + n
    stretch: float = 1.0  # YaRN's factor, from a text of 16 tokens


@dataclass(frozen=True)
class Spec:
    """What a checkpoint is to hold."""

    kind: str = "eagle3"  # or "eagle"
    hidden: int = 32
    target_hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 48
    vocab: int = 60
    draft_vocab: int = 60
    layers: int = 1
    taps: tuple[int, ...] = (2, 4, 5)  # boundary ids; the target has 8 layers
    theta: float = 10000.0
    eps: float = 1e-3  # large enough to show
    fc_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    own_embedding: bool = False
    own_head: bool = True
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    parallel: bool = False
    mask_token: int = 59
    token_ids: tuple[int, ...] = ()  # the draft vocabulary; () = drawn
    latent: Latent | None = None
    further_heads: int = 0  # behind the layers: a Gumiho

    @property
    def state_width(self) -> int:
        return self.target_hidden * len(self.taps)

    @property
    def reads_taps(self) -> bool:
        return self.taps != (FINAL,)


def random_weights(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Under the names of the `speculators` layout."""
    weights = RandomWeights(seed)
    matrix = weights.matrix

    first_width = 2 * spec.hidden if spec.kind == "eagle3" else spec.hidden
    if spec.kind == "eagle":
        matrix("fc.weight", spec.hidden, 2 * spec.hidden)
    elif spec.reads_taps:
        matrix("fc.weight", spec.hidden, spec.state_width)
    if spec.fc_bias:
        matrix("fc.bias", spec.hidden)
    if spec.norm_before_fc:
        matrix("input_norm.weight", spec.state_width)
    for i in range(len(spec.taps) if spec.fc_norm else 0):
        matrix(f"fc_norm.{i}.weight", spec.target_hidden)
    for i in range(spec.layers):
        layer, width = f"layers.{i}", first_width if i == 0 else spec.hidden
        if i or spec.kind == "eagle3":
            matrix(f"{layer}.input_layernorm.weight", spec.hidden)
        if i == 0 and spec.kind == "eagle3":
            matrix(f"{layer}.hidden_norm.weight", spec.hidden)
        for part, shape in _latent_shapes(spec, spec.latent, width) if spec.latent is not None else ():
            matrix(f"{layer}.self_attn.{part}.weight", *shape)
        for part, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)) if spec.latent is None else ():
            matrix(f"{layer}.self_attn.{part}_proj.weight", heads * spec.head_dim, width)
            if spec.qkv_bias:
                matrix(f"{layer}.self_attn.{part}_proj.bias", heads * spec.head_dim)
        matrix(f"{layer}.self_attn.o_proj.weight", spec.hidden, spec.heads * (spec.latent.values if spec.latent else spec.head_dim))
        if spec.out_bias:
            matrix(f"{layer}.self_attn.o_proj.bias", spec.hidden)
        for part in ("q", "k") if spec.head_norms else ():
            matrix(f"{layer}.self_attn.{part}_norm.weight", spec.head_dim)
        matrix(f"{layer}.post_attention_layernorm.weight", spec.hidden)
        weights.mlp(layer, spec.hidden, spec.intermediate)
    if spec.kind == "eagle3":
        matrix("norm.weight", spec.hidden)
    for head, place in itertools.product(range(spec.further_heads), range(HEAD_DEPTH)):
        matrix(f"mlp.{head}.{place}.linear.weight", spec.hidden, spec.hidden if place else 2 * spec.hidden)
        matrix(f"mlp.{head}.{place}.linear.bias", spec.hidden)
    if spec.own_embedding:
        matrix("embed_tokens.weight", spec.vocab, spec.hidden)
    if spec.own_head:
        matrix("lm_head.weight", spec.draft_vocab, spec.hidden)
    if spec.draft_vocab != spec.vocab:
        weights.vocabulary(spec.vocab, spec.draft_vocab, spec.token_ids)
    if spec.parallel:
        weights.tensors["mask_hidden"] = torch.randn(1, 1, spec.state_width, generator=weights.generator)
    return weights.tensors


def _latent_shapes(spec: Spec, sizes: Latent, width: int) -> list[tuple[str, tuple[int, ...]]]:
    queries, rank = spec.heads * (sizes.plain + sizes.turned), sizes.q_rank
    of_queries = [("q_a_proj", (rank, width)), ("q_a_layernorm", (rank,)), ("q_b_proj", (queries, rank))]
    return [
        *(of_queries if rank else [("q_proj", (queries, width))]),
        ("kv_a_proj_with_mqa", (sizes.rank + sizes.turned, width)),
        ("kv_a_layernorm", (sizes.rank,)),
        ("kv_b_proj", (spec.heads * (sizes.plain + sizes.values), sizes.rank)),
    ]


@dataclass(frozen=True)
class Target:
    """What a drafter shares with its target, and states that depend on the whole text up to a token."""

    spec: Spec
    embed_scale: float = 1.0
    logits_scale: float = 1.0
    softcap: float | None = None

    @property
    def embedding(self) -> Tensor:
        return _table(self.spec.vocab, self.spec.target_hidden, 11)

    @property
    def head(self) -> Tensor:
        return 0.4 * _table(self.spec.vocab, self.spec.target_hidden, 12)

    def state(self, text: Sequence[int], boundary: int) -> Tensor:
        """[target_hidden] of the text's last token."""
        return _state(tuple(text), boundary, self.spec.target_hidden)


@cache
def _table(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@cache
def _state(text: tuple[int, ...], boundary: int, width: int) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(hash((text, boundary)) % 2**40))


class Reference(PlainNetwork):
    """Guesses of a drafter, recomputed from the text for every single one."""

    def __init__(self, spec: Spec, weights: dict[str, Tensor], target: Target) -> None:
        super().__init__(weights, spec.eps)
        self.spec, self.target = spec, target
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...], int], Tensor] = {}

    def probs(self, text: Sequence[int], path: Sequence[int] = (), first: int = 0) -> Tensor:
        """[vocab] of the token behind text + path; path: own guesses. first: slots before it are missing."""
        key = tuple(text), tuple(path), first
        if key not in self._known:
            self._known[key] = self._compute(*key)
        return self._known[key]

    def parallel_probs(self, text: Sequence[int], count: int, first: int = 0) -> Tensor:
        """[count, vocab], P-EAGLE: masks stand behind the text."""
        features = [self._encode(self._states(text[: i + 1])) for i in range(first, len(text) - 1)]
        features += [self._encode(self.weights["mask_hidden"].flatten())] * (count - 1)
        tokens = [*text[first + 1 :], *[self.spec.mask_token] * (count - 1)]
        return self._scores(self._layers(tokens, torch.stack(features), first)[-count:])

    def _compute(self, text: tuple[int, ...], path: tuple[int, ...], first: int) -> Tensor:
        tokens = [*text[first + 1 :]]
        features = [self._encode(self._states(text[: i + 1])) for i in range(first, len(text) - 1)]
        outputs = self._layers(tokens, torch.stack(features), first)
        if self.spec.further_heads and len(path) >= 2:
            return self._scores(self._further(tokens, features, outputs[-1], path, first)[None])[0]
        for token in path:
            own = self._norm("norm", outputs[-1]) if self.spec.norm_output else outputs[-1]
            tokens, features = [*tokens, token], [*features, own]
            outputs = self._layers(tokens, torch.stack(features), first)
        return self._scores(outputs[-1:])[0]

    def _further(self, tokens: list[int], features: list[Tensor], own: Tensor, path: Sequence[int], first: int) -> Tensor:
        """Li et al. 2025: what the layers read for the first two guesses, through the head of the next one."""
        behind = self._layers([*tokens, path[0]], torch.stack([*features, own]), first)[-1]
        pairs = torch.stack([own, behind])
        x = self._linear("fc", torch.cat([self._embed(path[:2]), pairs], -1)).flatten()
        for place in range(HEAD_DEPTH):
            grown = F.silu(self._linear(f"mlp.{len(path) - 2}.{place}.linear", x))
            x = x + grown if place else grown
        return x

    def _states(self, text: Sequence[int]) -> Tensor:
        return torch.cat([self.target.state(text, boundary) for boundary in self.spec.taps])

    def _encode(self, states: Tensor) -> Tensor:
        if self.spec.kind == "eagle" or not self.spec.reads_taps:
            return states
        if self.spec.fc_norm:
            states = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(states.chunk(len(self.spec.taps)))])
        if self.spec.norm_before_fc:
            states = self._norm("input_norm", states)
        return self._linear("fc", states)

    def _layers(self, tokens: Sequence[int], features: Tensor, first: int) -> Tensor:
        embedded = self._embed(tokens)
        if self.spec.kind == "eagle":
            x = read = self._linear("fc", torch.cat([embedded, features], -1))
        else:
            normed = self._norm("layers.0.hidden_norm", features)
            x = normed if self.spec.norm_before_residual else features
            read = torch.cat([self._norm("layers.0.input_layernorm", embedded), normed], -1)
        for i in range(self.spec.layers):
            layer = f"layers.{i}"
            if i:
                read = self._norm(f"{layer}.input_layernorm", x)
            x = x + self._attention(f"{layer}.self_attn", read, first)
            x = x + self._mlp(layer, self._norm(f"{layer}.post_attention_layernorm", x))
        return x

    def _attention(self, name: str, x: Tensor, first: int) -> Tensor:
        if self.spec.latent is not None:
            return self._latent_attention(name, x, first, self.spec.latent)
        spec, count = self.spec, len(x)
        q, k, v = (self._linear(f"{name}.{part}_proj", x).view(count, -1, spec.head_dim) for part in "qkv")
        if spec.head_norms:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        q, k = self._rotate(q, first), self._rotate(k, first)
        return self._attend(name, q, k, v)

    def _latent_attention(self, name: str, x: Tensor, first: int, sizes: Latent) -> Tensor:
        """As published (DeepSeek-AI 2024): keys and values of each head are made whole."""
        queries, read = f"{name}.q_proj", x
        if sizes.q_rank:
            queries, read = f"{name}.q_b_proj", self._norm(f"{name}.q_a_layernorm", self._linear(f"{name}.q_a_proj", x), 1e-6)
        q, q_turned = self._linear(queries, read).unflatten(-1, (self.spec.heads, -1)).split((sizes.plain, sizes.turned), -1)
        latent, k_turned = self._linear(f"{name}.kv_a_proj_with_mqa", x).split((sizes.rank, sizes.turned), -1)
        made = self._linear(f"{name}.kv_b_proj", self._norm(f"{name}.kv_a_layernorm", latent, 1e-6))
        k, v = made.unflatten(-1, (self.spec.heads, -1)).split((sizes.plain, sizes.values), -1)
        k_turned = k_turned[:, None].expand(-1, self.spec.heads, -1)
        q_turned, k_turned = (self._rotate(t, first, sizes) for t in (q_turned, k_turned))
        q = torch.cat([q, q_turned], -1) * (1 + 0.1 * math.log(sizes.stretch)) ** 2
        return self._attend(name, q, torch.cat([k, k_turned], -1), v)

    def _attend(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unseen = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return self._linear(f"{name}.o_proj", attended(q, k, v, q.shape[-1] ** -0.5, unseen))

    def _rotate(self, x: Tensor, first: int, sizes: Latent | None = None) -> Tensor:
        half = x.shape[-1] // 2
        speeds = self.spec.theta ** -(torch.arange(half) / half)
        if sizes is not None and sizes.stretch != 1:  # YaRN (Peng et al. 2023): what turns less than 32 times slows down by and by
            least, most = (half * math.log(16 / (2 * math.pi * turns)) / math.log(self.spec.theta) for turns in (32, 1))
            share = ((torch.arange(half) - max(math.floor(least), 0)) / (math.ceil(most) - max(math.floor(least), 0))).clamp(0, 1)
            speeds = speeds * (1 - share) + speeds / sizes.stretch * share
        return turned(x, torch.arange(first, first + len(x))[:, None] * speeds, sizes is not None and sizes.pairs)

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor(list(tokens))
        return self.weights["embed_tokens.weight"][ids] if self.spec.own_embedding else self.target.embedding[ids] * self.target.embed_scale

    def _scores(self, outputs: Tensor) -> Tensor:
        """[n, vocab] probabilities by token id."""
        normed = self._norm("norm", outputs) if self.spec.kind == "eagle3" else outputs
        if self.spec.own_head:
            logits = normed @ self.weights["lm_head.weight"].T
        else:
            logits = normed @ self.target.head.T * self.target.logits_scale
            if self.target.softcap is not None:
                logits = self.target.softcap * (logits / self.target.softcap).tanh()
        return self._by_token(logits.softmax(-1), self.spec.vocab)


def eagle2_tree(log_probs: Callable[[tuple[int, ...]], Tensor], top_k: int, depth: int, num_nodes: int) -> tuple[list[int], list[int]]:
    """(tokens, parents) of EAGLE-2's tree (Li et al. 2024), paths at most `depth` long. log_probs(path) [vocab]."""

    def children(path: tuple[int, ...], score: float) -> list[tuple[float, tuple[int, ...]]]:
        best = log_probs(path).topk(top_k)
        return [(score + float(p), (*path, int(t))) for p, t in zip(best.values, best.indices, strict=True)]

    frontier = children((), 0.0)
    pool = list(frontier)
    for _ in range(depth - 1):
        grown = [child for score, path in frontier for child in children(path, score)]
        pool += grown
        frontier = sorted(grown, key=lambda node: -node[0])[:top_k]
    kept = sorted(pool, key=lambda node: -node[0])[:num_nodes]
    paths = sorted((path for _, path in kept), key=lambda path: (len(path), path))
    return [path[-1] for path in paths], [paths.index(path[:-1]) if path[:-1] else -1 for path in paths]
