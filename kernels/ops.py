"""The ops of a program: what each computes, from which buffers, with which weights. Plain data, and no network runs here."""

import math
from dataclasses import dataclass
from typing import Literal

# Every op reads the buffers `inputs` and writes the buffers `outputs`; a buffer is written once. A buffer has one row of
# its width for each of the batch's T tokens, from GatherRows on for each of the N tokens whose logits are wanted.


@dataclass(frozen=True)
class Embed:
    """Rows of weight [vocab, width] at the batch's token ids, times scale."""

    inputs: tuple[()]
    outputs: tuple[str]
    weight: str
    scale: float = 1.0


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight + bias, of x less its mean if centred. "" = none. add_one: the weight is stored less one.

    groups: a row's columns are so many runs of equal length, each normalised by itself.
    """

    inputs: tuple[str]
    outputs: tuple[str]
    weight: str
    eps: float
    bias: str = ""
    add_one: bool = False
    centred: bool = False
    groups: int = 1


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias [+ residual]. Several weights [out, in] are fused along their outputs, in this order.

    inputs: (x,) or (x, residual). biases: one name a weight, "" = none; () = none at all.
    """

    inputs: tuple[str] | tuple[str, str]
    outputs: tuple[str]
    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockLinear:
    """Runs of columns, each multiplied by a matrix of its own: run g of the output is run g of x @ the g-th of `groups` parts of weight.T.

    weight [groups * n, width / groups]. What each head of latent attention does to its queries and its results (DeepSeek-AI 2024).
    """

    inputs: tuple[str]
    outputs: tuple[str]
    weight: str
    groups: int


@dataclass(frozen=True)
class LowRank:
    """What each row's adapter adds to a product (LoRA, Hu et al. 2021): (x @ down.T) @ up [+ residual]; without an adapter, 0 [+ residual].

    inputs: (x,) or (x, residual). weights: those of the product, whose factors stand in an AdapterBank and change while the network
    serves. Rows find theirs by the batch's `adapters`.
    """

    inputs: tuple[str] | tuple[str, str]
    outputs: tuple[str]
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Attention:
    """Normalise and rotate q and k, write k and v to cache layer `layer`, attend.

    inputs hold q | k | v side by side, in one buffer or in several; without v where the layer has its values in its keys.
    kv_layers[layer] has the kv heads, their widths and the window. num_heads 0: the inputs hold k | v, which are written and nothing
    else happens (outputs are empty). rope "" = no rotation; a table shorter than k_dim / 2 rotates the first dimensions only. Halves
    are rotated (x1 | x2), not pairs. q_norm, k_norm: weights [k_dim] of an RMSNorm over each head before the rotation; both or none ("").
    norm_last: behind the rotation, whose table then has an attention_factor of 1. sinks: weight [num_heads] of scores that join each
    head's softmax as if there were one more place, whose value is 0 (OpenAI 2025); "" = none. frozen: the inputs hold q alone and nothing
    is written, for the layer is another network's, whose cache this one is run with (Gemma 4's assistants, 2026); it has no k_norm.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layer: int
    num_heads: int
    scale: float
    rope: str = ""
    softcap: float | None = None
    q_norm: str = ""
    k_norm: str = ""
    norm_eps: float = 1e-6
    norm_add_one: bool = False
    norm_last: bool = False
    sinks: str = ""
    frozen: bool = False


@dataclass(frozen=True)
class Activation:
    """function(x), or gated function(gate) * up. Gated inputs hold gate | up side by side, in two buffers or in one.

    function "" = none: gate * up. In two, a gate of one column holds for all columns of up. CLAMPED (gpt-oss): gate and |up| are at most
    CLAMPED_LIMIT, then gate * sigmoid(CLAMPED_SLOPE * gate) * (up + 1).
    """

    inputs: tuple[str] | tuple[str, str]
    outputs: tuple[str]
    function: str  # one of ACTIVATIONS; gated also "" or CLAMPED
    gated: bool


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "relu2")
CLAMPED, CLAMPED_SLOPE, CLAMPED_LIMIT = "clamped_swiglu", 1.702, 7.0


@dataclass(frozen=True)
class Experts:
    """Gated MLPs of which every row has some (Shazeer et al. 2017): sum of weight * down @ (function(gate @ x) * (up @ x)).

    inputs: (x, the router's logits, one an expert), of which scores are made: a softmax over all, or the sigmoid of each. A row has the
    `top` experts with the greatest scores, of equals the first. Its weights are their scores; renormalise: divided by their sum; times
    scale. Weights of each expert: gates and ups [n, in], downs [in, n]. biases, where products have any: weights [experts, 2 n] with those
    of gate and up by turns, and [experts, in].

    correction: weight [experts] that is added to the scores, in float32, for choosing only; "" = none. num_groups: experts are that many
    groups of neighbours, and a row's come from the top_groups whose two best are greatest together (DeepSeek-AI 2024).
    scales: weight [experts] of what each expert's share is multiplied by at last, in float32; "" = none.
    """

    inputs: tuple[str, str]
    outputs: tuple[str]
    gates: tuple[str, ...]
    ups: tuple[str, ...]
    downs: tuple[str, ...]
    function: str  # one of ACTIVATIONS, or CLAMPED
    top: int
    renormalise: bool
    biases: tuple[()] | tuple[str, str] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    correction: str = ""
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    scales: str = ""

    @property
    def has_groups(self) -> bool:
        """Whether groups leave any expert out."""
        return self.top_groups < self.num_groups


@dataclass(frozen=True)
class LocalConv:
    """Mixes each token with those just before it among its row's new tokens: a grouped dynamic depthwise convolution (DFlash 2, 2026).

    y[i, c] = sum over t < taps of (weight[side, t, c] + kernels[i, side, t, c // n]) * x[i - t, c], where tokens before the row's
    first new one count as 0. inputs: (x, kernels [sides * taps * groups], of which n = width / groups columns share one).
    weight [sides, taps, width].
    """

    inputs: tuple[str, str]
    outputs: tuple[str]
    weight: str
    side: int


@dataclass(frozen=True)
class CausalConv:
    """Mixes each token with those just before it in its sequence: a depthwise convolution, and a function of what it yields.

    y[i, c] = function(sum over t < taps of weight[c, t] * x[i - (taps - 1) + t, c] + bias[c]); tokens before the first count as 0. The
    tokens before a tree's are its ancestors. weight [width, taps] or [width, 1, taps]; bias "" = none; function "" = none.
    state_layers[layer] keeps the taps - 1 tokens before a row's new ones, and its guesses.
    """

    inputs: tuple[str]
    outputs: tuple[str]
    layer: int
    weight: str
    bias: str = ""
    function: str = ""  # or one of ACTIVATIONS


@dataclass(frozen=True)
class GatedDelta:
    """Linear attention with a forgetful memory: the gated delta rule (Yang et al. 2025), then a gated norm over each head.

    inputs: (q | k | v, z, b, a), q and k of num_k_heads heads of k_dim, v and z of num_v_heads heads of v_dim, b and a one number a value
    head; or (q | k | v, z, b | a). Value head h has key head h * num_k_heads // num_v_heads. Of each token, in float32:

        q, k = x / sqrt(sum(x^2) + 1e-6) of each, and q / sqrt(k_dim)
        S = S * exp(-exp(decay) * softplus(a + step))                # S [k_dim, v_dim], one a value head, 0 before the first token
        S = S + outer(k, sigmoid(b) * (v - k @ S))
        y = norm(q @ S) * silu(z)                                    # an RMSNorm with weight [v_dim]

    A tree's tokens go on from their parents' memory. decay, step: weights [num_v_heads]. state_layers[layer] keeps S behind the row's last
    token that is sure to stay, and what guesses would add.
    """

    inputs: tuple[str, str, str] | tuple[str, str, str, str]
    outputs: tuple[str]
    layer: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    decay: str
    step: str
    norm: str
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class StateSpace:
    """Linear attention with a fading memory: a selective state space (Mamba 2; Dao and Gu 2024).

    inputs: (v | k | q, a), v of num_v_heads heads of v_dim, k and q of num_k_heads heads of k_dim (the paper's x, B and C), a one number a
    value head. Value head h has key head h * num_k_heads // num_v_heads. Of each token, in float32:

        dt = softplus(a + step), but at least `least` and at most `most`
        S = S * exp(-exp(decay) * dt) + outer(k, dt * v)             # S [k_dim, v_dim], one a value head, 0 before the first token
        y = q @ S + skip * v

    decay, step, skip: weights [num_v_heads]. The rest as in GatedDelta; what is kept of a guess are its inputs.
    """

    inputs: tuple[str, str]
    outputs: tuple[str]
    layer: int
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    decay: str
    step: str
    skip: str
    least: float = 0.0
    most: float = math.inf


@dataclass(frozen=True)
class Add:
    inputs: tuple[str, str]
    outputs: tuple[str]


@dataclass(frozen=True)
class Concat:
    """The inputs' columns side by side; groups: of so many runs of equal length in each, the first ones, then the second ones, ..."""

    inputs: tuple[str, ...]
    outputs: tuple[str]
    groups: int = 1


@dataclass(frozen=True)
class GatherRows:
    """Rows logits_indices of a buffer: T rows become N."""

    inputs: tuple[str]
    outputs: tuple[str]


@dataclass(frozen=True)
class Scale:
    """x * factor [* weight], a weight of one number; "" = none."""

    inputs: tuple[str]
    outputs: tuple[str]
    factor: float
    weight: str = ""


@dataclass(frozen=True)
class Softcap:
    """cap * tanh(x / cap)."""

    inputs: tuple[str]
    outputs: tuple[str]
    cap: float


@dataclass(frozen=True)
class ArgMax:
    """outputs: (column of the greatest entry, int64, the lowest among equals; its value)."""

    inputs: tuple[str]
    outputs: tuple[str, str]


@dataclass(frozen=True)
class TopK:
    """outputs: (columns of the k greatest entries, int64; their values), greatest first."""

    inputs: tuple[str]
    outputs: tuple[str, str]
    k: int


Op = (
    Embed | RMSNorm | Linear | BlockLinear | LowRank | Attention | Activation | Experts | LocalConv | CausalConv | GatedDelta | StateSpace
    | Add | Concat | GatherRows | Scale | Softcap | ArgMax | TopK
)
