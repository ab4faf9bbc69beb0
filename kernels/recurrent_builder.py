"""Layers that keep a state of their sequence, as ops under checkpoint names: linear attention, state spaces, short convolutions."""

import math

from .decoder_builder import DecoderBuilder, layer
from .layout import StateLayerSpec
from .ops import Activation, CausalConv, GatedDelta, StateSpace
from .rope import UnsupportedModel


class RecurrentBuilder(DecoderBuilder):
    """A decoder under construction that may have such layers."""

    def gated_delta(self, i: int, x: str, by_key_head: bool = False) -> str:
        """Linear attention by the gated delta rule behind a short convolution, and the projection behind it.

        by_key_head: the checkpoint has what belongs to each key head together, else a weight for each input.
        """
        name, width = f"{layer(i)}.linear_attn", self._widths[x]
        num_k, num_v, k_dim, v_dim, taps = (
            int(self.config[f"linear_{what}"])
            for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        )
        if min(num_k, num_v, k_dim, v_dim, taps) < 1 or num_v % num_k:
            raise UnsupportedModel(f"linear attention with {num_v} value heads over {num_k} key heads")
        keys, values = num_k * k_dim, num_v * v_dim
        read = self._delta_inputs_by_key_head if by_key_head else self._delta_inputs
        qkv, z, b, a = read(name, x, (num_k, num_v, k_dim, v_dim))
        mixed = self.causal_conv(f"{name}.conv1d", qkv, taps, function=self._function())
        op = GatedDelta(
            inputs=(mixed, z, b, a),
            outputs=(name,),
            layer=len(self._state_layers),
            num_k_heads=num_k,
            num_v_heads=num_v,
            k_dim=k_dim,
            v_dim=v_dim,
            decay=self.weight(f"{name}.A_log", num_v),
            step=self.weight(f"{name}.dt_bias", num_v),
            norm=self.weight(f"{name}.norm.weight", v_dim),
            norm_eps=self._eps,
        )
        self._state_layers.append(StateLayerSpec(values * k_dim, 2 * keys + values + 2 * num_v))
        return self.linear(f"{name}.out_proj", self._append(op, values), width)

    def causal_conv(self, name: str, x: str, taps: int, bias: bool = False, function: str = "") -> str:
        """Over the tokens of a sequence; its weights are those of a Conv1d."""
        width = self._widths[x]
        weight = self.weight(f"{name}.weight", width, 1, taps)
        op = CausalConv((x,), (name,), len(self._state_layers), weight, self.weight(f"{name}.bias", width) if bias else "", function)
        self._state_layers.append(StateLayerSpec((taps - 1) * width, width))
        return self._append(op, width)

    def short_conv(self, i: int, x: str, taps: int, bias: bool = False) -> str:
        """A short convolution between two gates, and the projection behind it (LFM2)."""
        name, width = f"{layer(i)}.conv", self._widths[x]
        if bias:
            raise UnsupportedModel("convolutions with biases")
        before, behind, read = self.parts(f"{name}.in_proj", 1, (width, width, width), width)
        gate, values = (self.product(x, (part,), f"{name}.{what}") for part, what in ((before, "before"), (read, "read")))
        mixed = self.causal_conv(f"{name}.conv", self._append(Activation((gate, values), (f"{name}.gated",), "", True), width), taps)
        mixed = self._append(Activation((self.product(x, (behind,), f"{name}.behind"), mixed), (name,), "", True), width)
        return self.linear(f"{name}.out_proj", mixed, width)

    def state_space(self, i: int, x: str, scales: tuple[float, ...] = (1.0,) * 5, normed: bool = True) -> str:
        """Mamba 2: a state space behind a short convolution, a gate and a norm of each group, and the projection behind them.

        scales: of z, v, k, q and a, as the first projection has them.
        """
        name, width = f"{layer(i)}.{self.state_name}", self._widths[x]
        if self.flag("mamba_proj_bias"):
            raise UnsupportedModel("mamba_proj_bias")
        heads, groups, k_dim, v_dim, taps = (
            int(self.config[f"mamba_{what}"]) for what in ("n_heads", "n_groups", "d_state", "d_head", "d_conv")
        )
        if min(heads, groups, k_dim, v_dim, taps) < 1 or heads % groups:
            raise UnsupportedModel(f"a state space of {heads} heads in {groups} groups")
        values = heads * v_dim
        keys = groups * k_dim
        sizes = (values, values + 2 * keys, heads)
        if len(set(scales[1:4])) == 1:
            z, vkq, a = self._scaled_products(name, x, dict(zip(("z", "vkq", "a"), sizes, strict=True)), (*scales[:2], scales[4]))
        else:
            parts = {"z": values, "v": values, "k": keys, "q": keys, "a": heads}
            z, v, k, q, a = self._scaled_products(name, x, parts, scales)
            vkq = self.concat((v, k, q), f"{name}.vkq")
        mixed = self.causal_conv(f"{name}.conv1d", vkq, taps, self.flag("mamba_conv_bias"), self._function())
        least, most = self.config.get("time_step_limit") or (0.0, math.inf)
        op = StateSpace(
            inputs=(mixed, a),
            outputs=(f"{name}.read",),
            layer=len(self._state_layers),
            num_k_heads=groups,
            num_v_heads=heads,
            k_dim=k_dim,
            v_dim=v_dim,
            decay=self.weight(f"{name}.A_log", heads),
            step=self.weight(f"{name}.dt_bias", heads),
            skip=self.weight(f"{name}.D", heads),
            least=float(least),
            most=float(most),
        )
        self._state_layers.append(StateLayerSpec(values * k_dim, sum(sizes[1:])))
        gated = self._append(Activation((z, self._append(op, values)), (f"{name}.gated",), "silu", gated=True), values)
        return self.linear(f"{name}.out_proj", self.norm(f"{name}.norm", gated, groups=groups) if normed else gated, width)

    def _scaled_products(self, name: str, x: str, sizes: dict[str, int], scales: tuple[float, ...]) -> list[str]:
        """By the parts of one weight, which have these outputs."""
        parts = self.parts(f"{name}.in_proj", 1, tuple(sizes.values()), self._widths[x])
        products = [self.product(x, (part,), f"{name}.{what}") for part, what in zip(parts, sizes, strict=True)]
        return [self.scale(product, scale) for product, scale in zip(products, scales, strict=True)]

    def _delta_inputs(self, name: str, x: str, heads: tuple[int, int, int, int]) -> tuple[str, str, str, str]:
        """q | k | v, z, b and a, from a weight each. heads: key and value heads, k_dim and v_dim."""
        num_k, num_v, k_dim, v_dim = heads
        widths = {"qkv": 2 * num_k * k_dim + num_v * v_dim, "z": num_v * v_dim, "b": num_v, "a": num_v}
        qkv, z, b, a = (self.linear(f"{name}.in_proj_{what}", x, width) for what, width in widths.items())
        return qkv, z, b, a

    def _delta_inputs_by_key_head(self, name: str, x: str, heads: tuple[int, int, int, int]) -> tuple[str, str, str, str]:
        """The same from two weights, in which the rows for one key head and its value heads lie together."""
        num_k, num_v, k_dim, v_dim = heads
        shared = num_v // num_k
        q, k, v, z = self.parts(f"{name}.in_proj_qkvz", num_k, (k_dim, k_dim, shared * v_dim, shared * v_dim), self._widths[x])
        b, a = self.parts(f"{name}.in_proj_ba", num_k, (shared, shared), self._widths[x])
        qkv = self.product(x, (q, k, v), f"{name}.qkv")
        return qkv, self.product(x, (z,), f"{name}.z"), self.product(x, (b,), f"{name}.b"), self.product(x, (a,), f"{name}.a")
