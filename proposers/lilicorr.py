"""LiLiCorr: a small transformer over the best guesses of all places, which says what goes with what (NVIDIA, arXiv 2608.20530, 2026).

Stands behind DFlash's layers, with or without DFlash 2's convolutions around them. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.upload import upload
from .block_heads import Block
from .block_parts import HeadParts
from .block_settings import BlockSettings
from .config_entry import SpeculativeConfigError

_FEATURES = 5  # numbers that a candidate's own score is told by
_MOST, _WIDEST = 64, 1 << 16  # of candidates, layers and heads; of states: attention grows with the square of places times candidates
_LAYER_NORM_EPS = 1e-5  # torch's default, which no config says


@dataclass(frozen=True)
class Lattice:
    """Candidates are the `top` best of a place; each gets a vector `into` and a vector `out_of` it, of length 1.

    The guess at place j is drawn by scale * <out_of(the guess before), into(candidate)>, the first one by the anchor's vector in place
    of that before. A candidate's own score only goes into the transformer. Nothing else can be guessed. The anchor is what the drafter
    made of the target's last state; a row without one has zeros for it.

    Places know each other by how far apart they are, so a shorter block is the beginning of the lattice.
    """

    weights: Mapping[str, Tensor]  # float32, by their names behind "lilicorr."
    products: Mapping[str, Callable[[Tensor], Tensor]]  # [n, in] -> [n, out] by the wide ones, likewise
    embed: Callable[[Tensor], Tensor]  # token ids [n] -> [n, H] of the target's table
    top: int
    num_layers: int
    num_heads: int
    norm_eps: float
    vector_eps: float
    scale: float
    reads_context: ClassVar[bool] = True

    def on(self, device: torch.device) -> Lattice:
        if self.weights["slot_embedding"].device == device:
            return self
        return replace(self, weights={name: weight.to(device) for name, weight in self.weights.items()})

    def describe(self) -> str:
        width = self.weights["slot_embedding"].shape[1]
        return f"lattice of each place's best {self.top}: {self.num_layers} layer{'s' * (self.num_layers > 1)} of width {width}"

    def begin(self, block: Block) -> _Path:
        return _Path(self, block)

    def states(self, candidates: Tensor, log_probs: Tensor, hidden: Tensor) -> Tensor:
        """[n, top, h] of the candidates [n, top] of n places, all but where they are; log_probs likewise, hidden [n, H]."""
        ranks = torch.arange(self.top, device=candidates.device, dtype=torch.float32)
        best = log_probs[:, :1]
        features = [log_probs, log_probs.exp(), log_probs - best, (ranks / max(self.top - 1, 1)).expand_as(log_probs)]
        features.append((ranks == 0).float().expand_as(log_probs))
        normed = F.layer_norm(torch.stack(features, -1), (_FEATURES,), *self._weight_and_bias("feature_mlp.0"), _LAYER_NORM_EPS)
        told = self.linear("feature_mlp.3", F.silu(self.linear("feature_mlp.1", normed)))
        embedded = self.embed(candidates.flatten()).view(*candidates.shape, -1)
        if "token_proj" in self.products:
            embedded = self.linear("token_proj", embedded)
        return embedded + self.linear("pass_hidden_proj", hidden)[:, None] + told + self.weights["rank_embedding"]

    def mixed(self, x: Tensor, is_there: Tensor) -> Tensor:
        """[R, n, top, h] what the transformer makes of the states x of n places each; is_there [R, n]: others are seen by nobody."""
        num_rows, num_places, _, width = x.shape
        x = (x + self.weights["slot_embedding"][:num_places, None]).flatten(1, 2)
        bias = self._bias(num_places).masked_fill(~is_there.repeat_interleave(self.top, 1)[:, None, None], -torch.inf)
        for i in range(self.num_layers):
            normed = self.norm(f"layers.{i}.attn_norm", x)
            parts = self.linear(f"layers.{i}.attn.in_proj", normed).view(num_rows, -1, 3, self.num_heads, width // self.num_heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
            x = x + self.linear(f"layers.{i}.attn.out_proj", attended)
            fed = F.silu(self.linear(f"layers.{i}.mlp.0", self.norm(f"layers.{i}.mlp_norm", x)))
            x = x + self.linear(f"layers.{i}.mlp.2", fed)
        return self.norm("output_norm", x).view(num_rows, num_places, self.top, width)

    def anchors(self, context: Tensor) -> Tensor:
        """[R, h] of contexts [R, H]; zeros for one of zeros, which the projection, having a bias, would make something of."""
        return self.norm("anchor_norm", self.linear("context_proj", context) * context.any(-1, keepdim=True))

    def vectors(self, x: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """(out_of, into) [n, top, factors] of states [n, top, h] beside their anchors [n, h]."""
        anchor = anchors[:, None].expand_as(x)
        factors = F.silu(self.linear("factor_input_proj", torch.cat([x, anchor, x * anchor], -1)))
        return self.vector("out_head", factors), self.vector("in_head", factors)

    def vector(self, name: str, x: Tensor) -> Tensor:
        return F.normalize(self.linear(name, x), dim=-1, eps=self.vector_eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        if name in self.products:
            return self.products[name](x.flatten(0, -2)).view(*x.shape[:-1], -1) + self.weights[f"{name}.bias"]
        return F.linear(x, *self._weight_and_bias(name))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.norm_eps)

    def _weight_and_bias(self, name: str) -> tuple[Tensor, Tensor]:
        return self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]

    def _bias(self, num_places: int) -> Tensor:
        """[1, heads, n * top, n * top] of the scores of attention, by how far a place lies behind the one that it sees."""
        relative = self.weights["relative_slot_bias"]
        place = torch.arange(num_places, device=relative.device)
        behind = place[:, None] - place
        bias = relative[:, behind + relative.shape[1] // 2] + (behind == 0) * self.weights["same_slot_bias"][:, None, None]
        return bias.repeat_interleave(self.top, 1).repeat_interleave(self.top, 2)[None]


class _Path:
    def __init__(self, lattice: Lattice, block: Block) -> None:
        logits, device = block.logits.float(), block.logits.device
        self._lattice, self._columns = lattice, logits.shape[1]
        best, self._candidates = logits.topk(lattice.top, -1)
        states = lattice.states(self._candidates, best - logits.logsumexp(-1, keepdim=True), block.hidden)
        # Rows of different lengths stand side by side: places that a row lacks hold its first one again.
        starts, counts = (torch.tensor(list(numbers))[:, None] for numbers in (block.starts, block.counts))
        places = torch.arange(int(counts.max()))
        is_there = places < counts
        row, place = is_there.nonzero(as_tuple=True)  # of each entry, in their order
        at, there, row, place = (upload(x, device) for x in (starts + places * is_there, is_there, row, place))
        mixed = lattice.mixed(states[at], there)[row, place]
        context = block.hidden.new_zeros(block.num_rows, block.hidden.shape[1]) if block.context is None else block.context
        anchors = lattice.anchors(context)
        self._out_of, self._into = lattice.vectors(mixed, anchors[row])
        self._starts = lattice.vector("anchor_out_head", anchors)

    def scores(self, rows: Tensor, at: Tensor, step: int, previous: Tensor) -> Tensor:
        if step:
            before = at - 1
            chosen = (self._candidates[before] == previous[:, None]).int().argmax(-1)
            out_of = self._out_of[before, chosen]
        else:
            out_of = self._starts[rows]
        edges = self._lattice.scale * torch.einsum("nf,ncf->nc", out_of, self._into[at])
        scores = torch.full((len(at), self._columns), -torch.inf, device=at.device, dtype=torch.float32)
        return scores.scatter_(1, self._candidates[at], edges)


def read_lilicorr(parts: HeadParts) -> Lattice:
    """Raises SpeculativeConfigError."""
    draft, settings = parts.draft, parts.draft.settings
    model, columns = int(draft.hf_config.hidden_size), draft.head.rows
    top, num_layers, num_heads = (settings.count(f"lilicorr_{name}", _MOST) for name in ("candidate_topk", "num_layers", "num_heads"))
    width = settings.count("lilicorr_hidden_size", _WIDEST, least=0) or model
    fed, factors = int(width * _positive(settings, "mlp_ratio")), settings.count("lilicorr_factor_dim", _WIDEST)
    if draft.token_ids is not None:
        raise SpeculativeConfigError(
            f"{settings.folder} is a LiLiCorr with a vocabulary of its own, which is not supported: take one that guesses all the target's"
        )
    if draft.from_anchor:
        raise SpeculativeConfigError(
            f"{settings.folder} is a LiLiCorr that guesses in the last known token's place ('sample_from_anchor'), which is not supported: "
            "its lattice begins at the first mask"
        )
    if model != parts.target.hidden_size:
        raise SpeculativeConfigError(
            f"the LiLiCorr in {settings.folder} reads embeddings of width {model}, the target's are {parts.target.hidden_size} wide: "
            "take the drafter that was trained for this target"
        )
    if top > columns or width % num_heads:
        raise SpeculativeConfigError(
            f"{settings.folder}/config.json: a lattice of {top} candidates out of {columns} tokens, {num_heads} heads of width {width}"
        )
    weights: dict[str, Tensor] = {}
    products: dict[str, Callable[[Tensor], Tensor]] = {}

    def take(name: str, *shape: int) -> None:
        tensor = parts.tensors.take(f"lilicorr.{name}", *shape)
        weights[name] = tensor.to(torch.float32, copy=True)  # not a view of a file that might change

    def linear(name: str, rows: int, columns: int) -> None:
        """A network of its own: there are k rows for each place, so that they take longer than the drafter's layers otherwise."""
        products[name] = parts.product(f"lilicorr.{name}.weight", rows, columns)
        take(f"{name}.bias", rows)

    if width != model:
        linear("token_proj", width, model)
    take("feature_mlp.0.weight", _FEATURES)
    take("feature_mlp.0.bias", _FEATURES)
    take("feature_mlp.1.weight", width, _FEATURES)
    take("feature_mlp.1.bias", width)
    linear("feature_mlp.3", width, width)
    for i in range(num_layers):
        take(f"layers.{i}.attn_norm.weight", width)
        linear(f"layers.{i}.attn.in_proj", 3 * width, width)
        linear(f"layers.{i}.attn.out_proj", width, width)
        take(f"layers.{i}.mlp_norm.weight", width)
        linear(f"layers.{i}.mlp.0", fed, width)
        linear(f"layers.{i}.mlp.2", width, fed)
    for name in ("output_norm", "anchor_norm"):
        take(f"{name}.weight", width)
    for name in ("pass_hidden_proj", "context_proj"):
        linear(name, width, model)
    linear("factor_input_proj", width, 3 * width)
    for name in ("out_head", "in_head", "anchor_out_head"):
        linear(name, factors, width)
    take("relative_slot_bias", num_heads, 2 * draft.block_size - 1)
    take("same_slot_bias", num_heads)
    take("slot_embedding", 1, 1, draft.block_size - 1, 1, width)
    take("rank_embedding", 1, 1, 1, top, width)
    weights |= {name: weights[name].view(-1, width) for name in ("slot_embedding", "rank_embedding")}
    return Lattice(
        weights=weights,
        products=products,
        embed=parts.embedding(),
        top=top,
        num_layers=num_layers,
        num_heads=num_heads,
        norm_eps=float(draft.hf_config.rms_norm_eps),
        vector_eps=_positive(settings, "vector_eps"),
        scale=_positive(settings, "logit_scale"),
    )


def _positive(settings: BlockSettings, name: str) -> float:
    """No setting has a default: one that was trained otherwise would load, and guess badly."""
    value = settings.number(f"lilicorr_{name}", 0.0)
    if not value > 0:
        raise SpeculativeConfigError(f"{settings.folder}/config.json: 'lilicorr_{name}' must be a positive number, not {value!r}")
    return value
