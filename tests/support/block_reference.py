"""DFlash drafters and what grew out of them, written out plainly: random weights, guesses by recomputing all from the text. No cache."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from plain_networks import PlainNetwork, RandomWeights, attended, turned
from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """What a checkpoint is to hold."""

    hidden: int = 32
    target_hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16  # not hidden / heads
    intermediate: int = 48
    vocab: int = 60
    draft_vocab: int = 60
    token_ids: tuple[int, ...] = ()  # of the draft vocabulary; () = random ones
    block_size: int = 6
    taps: tuple[int, ...] = (2, 4, 7)  # boundary ids; the target has 8 layers
    causal: tuple[bool, ...] = (False, False)  # one for each layer
    windows: tuple[int | None, ...] = (None, None)
    theta: float = 10000.0
    pairs: bool = False  # dimensions 2 i and 2 i + 1 of a head turn
    gemma: str = ""  # layers like a Gemma 4's, whose values are its "keys", or have a product of their own
    eps: float = 1e-3  # large enough to show
    mask_token: int = 59
    from_anchor: bool = False
    bias: bool = False
    own_embedding: bool = False
    own_head: bool = False
    markov: str = ""
    rank: int = 8
    confidence: str = ""  # "h" or "h, markov"
    fusion: str = ""  # DFlare: "norm first", as Tencent's, or "mix first", as `speculators` has it
    own_keys: bool = True  # of what a DFlare has mixed
    conv_taps: int = 0
    conv_groups: int = 0
    selector_top: int = 0  # of rank `rank`
    lattice_top: int = 0  # LiLiCorr's candidates
    lattice_width: int = 0  # 0 = `hidden`
    lattice_layers: int = 2
    lattice_heads: int = 4
    lattice_ratio: float = 1.5
    lattice_factors: int = 6
    lattice_scale: float = 4.0
    vector_eps: float = 1.0  # large enough to show
    gru: int = 0  # Domino's state
    gru_mixed: int = 0
    gru_first: int = 0  # guess that is corrected
    refiner: int = 0  # XPress's rank
    refiner_mlp: int = 0
    passes: int = 0
    logits_scale: float | None = None  # of its own, beside the target's head
    softcap: float | None = None

    @property
    def max_tokens(self) -> int:
        return self.block_size if self.from_anchor else self.block_size - 1


def random_weights(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    weights = RandomWeights(seed)
    matrix = weights.matrix

    if spec.fusion:
        shares = torch.randn(len(spec.causal), len(spec.taps), generator=weights.generator)
        weights.tensors[f"{'' if spec.fusion == 'mix first' else 'layer_'}fusion_weights"] = shares
    else:
        matrix("fc.weight", spec.hidden, len(spec.taps) * spec.target_hidden)
    if spec.fusion != "mix first":
        matrix("hidden_norm.weight", spec.hidden)
    matrix("norm.weight", spec.hidden)
    for i in range(len(spec.causal)):
        layer = f"layers.{i}"
        of_gemma = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if spec.gemma else ()
        for name in ("input_layernorm", "post_attention_layernorm", *of_gemma):
            matrix(f"{layer}.{name}.weight", spec.hidden)
        if spec.gemma:
            weights.tensors[f"{layer}.layer_scalar"] = torch.tensor([0.7 + 0.2 * i])
        for part, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads))[: 2 if spec.gemma == "keys" else 3]:
            matrix(f"{layer}.self_attn.{part}_proj.weight", heads * spec.head_dim, spec.hidden)
            if spec.bias:
                matrix(f"{layer}.self_attn.{part}_proj.bias", heads * spec.head_dim)
        matrix(f"{layer}.self_attn.o_proj.weight", spec.hidden, spec.heads * spec.head_dim)
        for part in "kv" if spec.fusion and spec.own_keys else "":
            matrix(f"{layer}.self_attn.{part}_proj_target.weight", spec.kv_heads * spec.head_dim, spec.hidden)
        if spec.fusion == "mix first":
            matrix(f"fusion_norms.{i}.weight", spec.hidden)
        for part in "qk":
            matrix(f"{layer}.self_attn.{part}_norm.weight", spec.head_dim)
        weights.mlp(layer, spec.hidden, spec.intermediate)
        for name in ("attention_conv", "mlp_conv") if spec.conv_taps else ():
            matrix(f"{layer}.{name}.base_kernel", 2, spec.conv_taps, spec.hidden, size=spec.hidden**0.5)
            matrix(f"{layer}.{name}.kernel_projection.weight", 2 * spec.conv_taps * spec.conv_groups, spec.hidden, size=0.5)
    if spec.own_embedding:
        matrix("embed_tokens.weight", spec.vocab, spec.hidden, size=spec.hidden**0.5)
    if spec.own_head:
        matrix("lm_head.weight", spec.draft_vocab, spec.hidden, size=2.0)
    if spec.draft_vocab != spec.vocab:
        weights.vocabulary(spec.vocab, spec.draft_vocab, spec.token_ids)
    if spec.markov:
        matrix("markov_head.markov_w1.weight", spec.vocab, spec.rank, size=spec.rank**0.5)
        matrix("markov_head.markov_w2.weight", spec.draft_vocab, spec.rank, size=2.0)
        name, rows, width = {"gated": ("gate", 1, 1), "rnn": ("joint", 3, 2), "vanilla": ("", 0, 0)}[spec.markov]
        if name:
            matrix(f"markov_head.{name}_proj.weight", rows * spec.rank, width * spec.rank + spec.hidden)
            matrix(f"markov_head.{name}_proj.bias", rows * spec.rank)
    if spec.selector_top:
        matrix("candidate_selector.hidden_projection.weight", spec.rank, spec.hidden)
        for name in ("predecessor", "successor"):
            matrix(f"candidate_selector.{name}_codebook", spec.draft_vocab, spec.rank, size=spec.rank**0.5)
    if spec.lattice_top:
        _lattice(spec, matrix)
    if spec.gru:
        matrix("prefix_gru.weight_ih_l0", 3 * spec.gru, spec.hidden, size=2.0)
        matrix("prefix_gru.weight_hh_l0", 3 * spec.gru, spec.gru, size=2.0)
        matrix("embed_proj.0.weight", spec.gru_mixed, spec.hidden + spec.gru, size=3.0)
        matrix("embed_proj.2.weight", spec.draft_vocab, spec.gru_mixed, size=3.0)
    if spec.refiner:
        matrix("xpress_head.w1.weight", spec.vocab, spec.refiner, size=spec.refiner**0.5)
        matrix("xpress_head.w2.weight", spec.draft_vocab, spec.refiner)
        for name in ("down_h", "down_g"):
            matrix(f"xpress_head.{name}.weight", spec.refiner, spec.hidden)
        matrix("xpress_head.in_proj.weight", spec.refiner, 3 * spec.refiner)
        matrix("xpress_head.mix.L", spec.refiner, spec.block_size, spec.block_size)
        weights.mlp("xpress_head", spec.refiner, spec.refiner_mlp)
    if spec.confidence:
        matrix("confidence_head.proj.weight", 1, spec.hidden + (spec.rank if "markov" in spec.confidence else 0))
        matrix("confidence_head.proj.bias", 1)
    return weights.tensors


def _lattice(spec: Spec, matrix: Callable[..., None]) -> None:
    width = spec.lattice_width or spec.hidden
    fed, start = int(width * spec.lattice_ratio), "lilicorr"

    def linear(name: str, rows: int, columns: int) -> None:
        matrix(f"{start}.{name}.weight", rows, columns)
        matrix(f"{start}.{name}.bias", rows)

    if width != spec.hidden:
        linear("token_proj", width, spec.hidden)
    matrix(f"{start}.feature_mlp.0.weight", 5)
    matrix(f"{start}.feature_mlp.0.bias", 5)
    linear("feature_mlp.1", width, 5)
    linear("feature_mlp.3", width, width)
    for name in ("pass_hidden_proj", "context_proj"):
        linear(name, width, spec.hidden)
    for i in range(spec.lattice_layers):
        layer = f"layers.{i}"
        matrix(f"{start}.{layer}.attn.in_proj_weight", 3 * width, width, size=2.0)
        matrix(f"{start}.{layer}.attn.in_proj_bias", 3 * width)
        linear(f"{layer}.attn.out_proj", width, width)
        linear(f"{layer}.mlp.0", fed, width)
        linear(f"{layer}.mlp.2", width, fed)
        for name in ("attn_norm", "mlp_norm"):
            matrix(f"{start}.{layer}.{name}.weight", width)
    for name in ("output_norm", "anchor_norm"):
        matrix(f"{start}.{name}.weight", width)
    linear("factor_input_proj", width, 3 * width)
    for name in ("out_head", "in_head", "anchor_out_head"):
        linear(name, spec.lattice_factors, width)
    matrix(f"{start}.relative_slot_bias", spec.lattice_heads, 2 * spec.block_size - 1, size=3.0)
    matrix(f"{start}.same_slot_bias", spec.lattice_heads)
    matrix(f"{start}.slot_embedding", 1, 1, spec.block_size - 1, 1, width, size=width**0.5)
    matrix(f"{start}.rank_embedding", 1, 1, 1, spec.lattice_top, width, size=width**0.5)


@dataclass(frozen=True)
class Shared:
    """What a drafter reads of its target."""

    embedding: Tensor
    head: Tensor
    state: Callable[[Sequence[int], int], Tensor]  # (text, boundary) -> [target_hidden] of its last token
    embed_scale: float = 1.0
    logits_scale: float = 1.0
    softcap: float | None = None


class Reference(PlainNetwork):
    """One block filled in, from the text alone."""

    def __init__(self, spec: Spec, weights: dict[str, Tensor], shared: Shared) -> None:
        super().__init__(weights, spec.eps)
        self.spec, self._shared = spec, shared

    def probs(self, text: Sequence[int], count: int, guesses: Sequence[int] = (), first: int = 0, has_anchor: bool = True) -> Tensor:
        """[n, vocab] distributions of the guesses behind text, n = count or, with a correction, one more than the guesses given.

        guesses: what is guessed before each; first: context entries before it are missing. has_anchor: whether LiLiCorr's lattice
        knows the context's last state.
        """
        hidden = self.hidden(text, count, first)
        logits = self._logits(hidden)
        if self.spec.markov:
            logits = logits[: len(guesses) + 1] + self._biases([text[-1], *guesses][: len(logits)], hidden)
        elif self.spec.gru:
            logits = self._recurrent(logits, hidden, [text[-1], *guesses])
        elif self.spec.refiner:
            logits = self._refined(text, self._places(text, count, first))[-count:]
        elif self.spec.selector_top:
            logits = torch.stack([self._selected(*place) for place in zip(logits, hidden, [text[-1], *guesses], strict=False)])
        elif self.spec.lattice_top:
            context, lattice = self._context(text, first), Lattice(self.spec, self.weights, self._shared)
            logits = lattice.walked(hidden, context[-1] if has_anchor and len(context) else None, guesses)
        return self._by_token(logits.softmax(-1), self.spec.vocab)

    def confidences(self, text: Sequence[int], count: int, guesses: Sequence[int]) -> Tensor:
        """[len(guesses) + 1], at most count: what the confidence head says of each place."""
        before = torch.tensor([text[-1], *guesses][:count])
        read = self.hidden(text, count)[: len(before)]
        if "markov" in self.spec.confidence:
            read = torch.cat([read, self.weights["markov_head.markov_w1.weight"][before]], -1)
        return self._linear("confidence_head.proj", read)[:, 0].sigmoid()

    def hidden(self, text: Sequence[int], count: int, first: int = 0) -> Tensor:
        """[count, hidden] behind the last norm, of the places that guess."""
        return self._places(text, count, first)[-count:]

    def _places(self, text: Sequence[int], count: int, first: int) -> Tensor:
        """All of a block, the last known token's own before the others."""
        tokens = torch.tensor([text[-1]] + [self.spec.mask_token] * (count - 1 if self.spec.from_anchor else count))
        x = self._embedding()[tokens]
        for i in range(len(self.spec.causal)):
            layer = f"layers.{i}"
            if self.spec.gemma:
                y = self._attention(i, self._norm(f"{layer}.input_layernorm", x), text, first)
                x = x + self._norm(f"{layer}.post_attention_layernorm", y)
                y = self._norm(f"{layer}.pre_feedforward_layernorm", x)
                gate, up = (self._linear(f"{layer}.mlp.{part}_proj", y) for part in ("gate", "up"))
                y = self._linear(f"{layer}.mlp.down_proj", F.gelu(gate, approximate="tanh") * up)
                x = (x + self._norm(f"{layer}.post_feedforward_layernorm", y)) * self.weights[f"{layer}.layer_scalar"]
                continue
            x = x + self._around(
                f"{layer}.attention_conv", self._norm(f"{layer}.input_layernorm", x), lambda y, i=i: self._attention(i, y, text, first)
            )
            x = x + self._around(
                f"{layer}.mlp_conv", self._norm(f"{layer}.post_attention_layernorm", x), lambda y, layer=layer: self._mlp(layer, y)
            )
        return self._norm("norm", x)

    def _context(self, text: Sequence[int], first: int) -> Tensor:
        """[len(text) - 1 - first, hidden] what layers read of the target."""
        return self._norm("hidden_norm", self._linear("fc", self._states(text, first).flatten(1)))

    def _states(self, text: Sequence[int], first: int) -> Tensor:
        """[len(text) - 1 - first, taps, target_hidden]"""
        of_all = [torch.stack([self._shared.state(text[: i + 1], tap) for tap in self.spec.taps]) for i in range(first, len(text) - 1)]
        return torch.stack(of_all) if of_all else torch.zeros(0, len(self.spec.taps), self.spec.target_hidden)

    def _entries(self, i: int, text: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the context in layer i, before norm and rotation."""
        name, part, context = f"layers.{i}.self_attn", "proj", None
        if self.spec.fusion:
            part = "proj_target" if self.spec.own_keys else "proj"
            states, is_mixed_first = self._states(text, first), self.spec.fusion == "mix first"
            shares = self.weights[f"{'' if is_mixed_first else 'layer_'}fusion_weights"][i].softmax(-1)
            states = states if is_mixed_first else self._norm("hidden_norm", states)
            context = (states * shares[:, None]).sum(1)
            context = self._norm(f"fusion_norms.{i}", context) if is_mixed_first else context
        context = self._context(text, first) if context is None else context
        return self._linear(f"{name}.k_{part}", context), self._linear(f"{name}.{self._value}_{part}", context)

    @property
    def _value(self) -> str:
        return "k" if self.spec.gemma == "keys" else "v"

    def _around(self, name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """With the convolutions of DFlash 2: kernels of both are made of the input before the first."""
        if not self.spec.conv_taps:
            return sublayer(x)
        kernels = self._linear(f"{name}.kernel_projection", x).view(len(x), 2, self.spec.conv_taps, self.spec.conv_groups)
        return self._convolved(name, 1, kernels, sublayer(self._convolved(name, 0, kernels, x)))

    def _convolved(self, name: str, side: int, kernels: Tensor, x: Tensor) -> Tensor:
        group = self.spec.hidden // self.spec.conv_groups
        y = torch.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(self.spec.conv_taps, i + 1)):
                y[i] += (self.weights[f"{name}.base_kernel"][side, tap] + kernels[i, side, tap].repeat_interleave(group)) * x[i - tap]
        return y

    def _selected(self, logits: Tensor, hidden: Tensor, before: int) -> Tensor:
        """[draft_vocab] a place's scores behind the token `before`: candidates get what they have in common with it, others nothing."""
        name = "candidate_selector"
        if "t2d" in self.weights:  # the row of a token, or of the next lower one that there is
            before = max(0, int(self.weights["t2d"][: before + 1].sum()) - 1)
        context = self.weights[f"{name}.predecessor_codebook"][before] * self._linear(f"{name}.hidden_projection", hidden)
        best = logits.topk(self.spec.selector_top).indices
        shared = self.weights[f"{name}.successor_codebook"] @ context
        return torch.full_like(logits, -torch.inf).index_copy(0, best, (logits + shared)[best])

    def _attention(self, i: int, x: Tensor, text: Sequence[int], first: int) -> Tensor:
        spec, name = self.spec, f"layers.{i}.self_attn"
        keys, values = self._entries(i, text, first)
        known = len(keys)
        at = torch.arange(first, first + known + len(x))
        q = self._norm(f"{name}.q_norm", self._linear(f"{name}.q_proj", x).view(len(x), -1, spec.head_dim))
        keys = torch.cat([keys, self._linear(f"{name}.k_proj", x)])
        values = torch.cat([values, self._linear(f"{name}.{self._value}_proj", x)])
        k, v = self._norm(f"{name}.k_norm", keys.view(len(at), -1, spec.head_dim)), values.view(len(at), -1, spec.head_dim)
        if spec.gemma:
            v = v / (v.pow(2).mean(-1, keepdim=True) + spec.eps).sqrt()
        q, k = self._rotate(q, at[known:]), self._rotate(k, at)
        distance = at[known:, None] - at
        unseen = torch.zeros_like(distance, dtype=torch.bool)
        if spec.causal[i]:
            unseen |= distance < 0
        if (window := spec.windows[i]) is not None:
            unseen |= distance.abs() >= window
        scale = 1.0 if spec.gemma else spec.head_dim**-0.5
        return self._linear(f"{name}.o_proj", attended(q, k, v, scale, unseen))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.spec.head_dim // 2
        turns = torch.arange(half) < half // 4 if self.spec.gemma else torch.ones(half)
        return turned(x, positions[:, None] * turns * self.spec.theta ** -(torch.arange(half) / half), self.spec.pairs)

    def _embedding(self) -> Tensor:
        if not self.spec.own_embedding:
            return self._shared.embedding * self._shared.embed_scale
        return self.weights["embed_tokens.weight"] * (math.sqrt(self.spec.hidden) if self.spec.gemma else 1)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.spec.own_head:
            logits, cap = hidden @ self.weights["lm_head.weight"].T, self.spec.softcap
        else:
            logits = hidden @ self._shared.head.T * (self.spec.logits_scale or self._shared.logits_scale)
            cap = self.spec.softcap or self._shared.softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def _biases(self, before: Sequence[int], hidden: Tensor) -> Tensor:
        """[len(before), draft_vocab] of the Markov head, place by place."""
        w1, w2 = self.weights["markov_head.markov_w1.weight"], self.weights["markov_head.markov_w2.weight"]
        state = torch.zeros(self.spec.rank)
        rows: list[Tensor] = []
        for token, h in zip(before, hidden, strict=False):
            e = w1[token]
            if self.spec.markov == "gated":
                e = self._linear("markov_head.gate_proj", torch.cat([h, e])).sigmoid() * e
            elif self.spec.markov == "rnn":
                gate, candidate, output = self._linear("markov_head.joint_proj", torch.cat([state, e, h])).split(self.spec.rank)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                e = output.tanh()
            rows.append(w2 @ e)
        return torch.stack(rows)

    def _recurrent(self, logits: Tensor, hidden: Tensor, read: Sequence[int]) -> Tensor:
        """Domino's scores of as many places as there are tokens to read, one before each."""
        spec, rows = self.spec, list(logits[: len(read)])
        embedding = self._embedding()
        given, kept = (self.weights[f"prefix_gru.weight_{kind}_l0"].split(spec.gru) for kind in ("ih", "hh"))
        state = torch.zeros(spec.gru)
        for i in range(len(rows)):
            e = embedding[read[i]]
            reset, update = ((given[gate] @ e + kept[gate] @ state).sigmoid() for gate in (0, 1))
            state = update * state + (1 - update) * torch.tanh(given[2] @ e + reset * (kept[2] @ state))
            if i >= spec.gru_first:
                mixed = F.silu(self._linear("embed_proj.0", torch.cat([hidden[i], state])))
                rows[i] = rows[i] + self._linear("embed_proj.2", mixed)
        return torch.stack(rows)

    def _refined(self, text: Sequence[int], h: Tensor) -> Tensor:
        """XPress's scores of all places of a block."""
        spec, name, last = self.spec, "xpress_head", len(text) - 1
        own = self._logits(h)
        # by position in the text: what place k is for, and what stands before that
        known = {last: text[-1], last - 1: text[-2] if last else text[-1]}
        of_place = [last + k + int(spec.from_anchor) for k in range(len(h))]
        said = known | {at: token for at, token in zip(of_place, self._starts(text, own, h), strict=True) if at > last}
        refined = own
        for _ in range(spec.passes):
            x: list[Tensor] = []
            for k, at in enumerate(of_place):
                states = self._linear(f"{name}.down_h", h[k]), self._linear(f"{name}.down_g", h.mean(0))
                x.append(self._linear(f"{name}.in_proj", torch.cat([*states, self.weights[f"{name}.w1.weight"][said[at - 1]]])))
            rows: list[Tensor] = []
            for k in range(len(x)):
                m = x[k].clone()
                for j in range(k + 1):
                    m += self.weights[f"{name}.mix.L"][:, k, j] * x[j]
                rows.append(own[k] + self._linear(f"{name}.w2", m + self._mlp(name, m)))
            refined = torch.stack(rows)
            said = known | {at: self._token(row) for at, row in zip(of_place, refined, strict=True) if at > last}
        return refined

    def _starts(self, text: Sequence[int], own: Tensor, h: Tensor) -> list[int]:
        """Of each place, the token that the first pass finds there."""
        if not self.spec.selector_top:
            return [self._token(row) for row in own]
        starts = [] if self.spec.from_anchor else [text[-1]]
        for k in range(len(starts), len(h)):
            starts.append(self._token(self._selected(own[k], h[k], starts[-1] if starts else text[-1])))
        return starts

    def _token(self, logits: Tensor) -> int:
        column = int(logits.argmax())
        return column + int(self.weights["d2t"][column]) if "d2t" in self.weights else column


class Lattice(PlainNetwork):
    """LiLiCorr's head, candidate by candidate."""

    def __init__(self, spec: Spec, weights: dict[str, Tensor], shared: Shared) -> None:
        super().__init__({name.removeprefix("lilicorr."): tensor for name, tensor in weights.items()}, spec.eps)
        self._spec, self._shared = spec, shared

    def walked(self, hidden: Tensor, context: Tensor | None, guesses: Sequence[int]) -> Tensor:
        """[len(guesses) + 1, vocab], at most len(hidden): what each place is drawn from behind the guess before it."""
        spec = self._spec
        width = spec.lattice_width or spec.hidden
        cells = [(place, token, x) for place, h in enumerate(hidden) for token, x in self._candidates(place, h)]
        states = [x for _, _, x in cells]
        for i in range(spec.lattice_layers):
            states = self._layer(f"layers.{i}", [place for place, _, _ in cells], states)
        anchor = self._norm("anchor_norm", torch.zeros(width) if context is None else self._linear("context_proj", context))
        into: list[dict[int, Tensor]] = [{} for _ in hidden]
        out_of: list[dict[int, Tensor]] = [{} for _ in hidden]
        for (place, token, _), x in zip(cells, states, strict=True):
            x = self._norm("output_norm", x)
            factors = F.silu(self._linear("factor_input_proj", torch.cat([x, anchor, x * anchor])))
            into[place][token], out_of[place][token] = self._unit("in_head", factors), self._unit("out_head", factors)
        before = self._unit("anchor_out_head", anchor)
        rows: list[Tensor] = []
        for place, guess in zip(range(len(hidden)), [*guesses, -1], strict=False):
            scores = torch.full((spec.vocab,), -torch.inf)
            for token, vector in into[place].items():
                scores[token] = spec.lattice_scale * (before @ vector)
            rows.append(scores)
            before = out_of[place].get(guess, before)
        return torch.stack(rows)

    def _candidates(self, place: int, h: Tensor) -> list[tuple[int, Tensor]]:
        """Tokens, the best first, and what the transformer reads of each."""
        spec, head = self._spec, self.weights["lm_head.weight"] if self._spec.own_head else self._shared.head
        log_probs = (head @ h).log_softmax(0)
        tokens = log_probs.argsort(descending=True)[: spec.lattice_top].tolist()
        found: list[tuple[int, Tensor]] = []
        for rank, token in enumerate(tokens):
            own = float(log_probs[token])
            share = rank / (spec.lattice_top - 1) if spec.lattice_top > 1 else 0.0
            features = torch.tensor([own, math.exp(own), own - float(log_probs[tokens[0]]), share, float(rank == 0)])
            centred = features - features.mean()
            features = self._norm("feature_mlp.0", centred, 1e-5) + self.weights["feature_mlp.0.bias"]
            x = self._shared.embedding[token]
            x = self._linear("token_proj", x) if spec.lattice_width else x
            x = x + self._linear("pass_hidden_proj", h)
            x = x + self._linear("feature_mlp.3", F.silu(self._linear("feature_mlp.1", features)))
            found.append((token, x + self.weights["slot_embedding"][0, 0, place, 0] + self.weights["rank_embedding"][0, 0, 0, rank]))
        return found

    def _layer(self, name: str, places: Sequence[int], states: Sequence[Tensor]) -> list[Tensor]:
        weight, bias = self.weights[f"{name}.attn.in_proj_weight"], self.weights[f"{name}.attn.in_proj_bias"]
        parts = [(weight @ self._norm(f"{name}.attn_norm", x) + bias).chunk(3) for x in states]
        made: list[Tensor] = []
        for place, x, (query, _, _) in zip(places, states, parts, strict=True):
            heads: list[Tensor] = []
            for head in range(self._spec.lattice_heads):
                q = query.chunk(self._spec.lattice_heads)[head]
                keys, values = (torch.stack([p[of].chunk(self._spec.lattice_heads)[head] for p in parts]) for of in (1, 2))
                apart = [self.weights["relative_slot_bias"][head, place - other + self._spec.block_size - 1] for other in places]
                same = [self.weights["same_slot_bias"][head] * (place == other) for other in places]
                heads.append((keys @ q / math.sqrt(len(q)) + torch.stack(apart) + torch.stack(same)).softmax(0) @ values)
            x = x + self._linear(f"{name}.attn.out_proj", torch.cat(heads))
            made.append(x + self._linear(f"{name}.mlp.2", F.silu(self._linear(f"{name}.mlp.0", self._norm(f"{name}.mlp_norm", x)))))
        return made

    def _unit(self, name: str, x: Tensor) -> Tensor:
        y = self._linear(name, x)
        return y / max(float(y.norm()), self._spec.vector_eps)
