"""A decoder under construction: the parts that families share, as ops under checkpoint names.

Buffers are named after the weight that made them, so that a program reads like its checkpoint. Knows no family.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from .layout import KVLayerSpec, StateLayerSpec
from .ops import (
    CLAMPED,
    Activation,
    Add,
    ArgMax,
    Attention,
    BlockLinear,
    Concat,
    Embed,
    Experts,
    GatherRows,
    Linear,
    LocalConv,
    Op,
    RMSNorm,
    Scale,
    Softcap,
)
from .program import Program, RopeTable, RowsOf
from .rope import UnsupportedModel, rope_table

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu": "relu",
    "relu2": "relu2",
}
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
_EMBEDDING = "model.embed_tokens.weight"


class DecoderBuilder:
    """Appends ops: embed first, then the layers, finish last.

    Methods take names of buffers and return the name of the one they write. Raises UnsupportedModel for what a program cannot
    express.
    """

    def __init__(self, hf_config: PreTrainedConfig, max_model_len: int, dtype: torch.dtype) -> None:
        self.config: dict[str, Any] = hf_config.to_dict()
        self.dtype = dtype
        self.num_layers = int(hf_config.num_hidden_layers)
        self.vocab_size = int(self.config["vocab_size"])
        self.hidden_size = int(self.config["hidden_size"])
        self.intermediate_size = int(self.config.get("intermediate_size", 0))  # families that have nothing but experts do not say it
        self.num_heads = int(self.config["num_attention_heads"])
        self.num_kv_heads = int(self.config.get("num_key_value_heads") or self.num_heads)
        self.head_dim = int(self.config.get("head_dim") or self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} query heads do not share {self.num_kv_heads} heads evenly")

        # A family may change these before its first op.
        self.norms_add_one = False  # norm weights are stored less one
        self.layer_norms = False  # norms subtract the mean
        self.norm_biases = False
        self.activation_setting = "hidden_act"  # where the config names the activation
        self.attention_name, self.state_name = "self_attn", "mamba"
        self.unread: set[str] = set()  # what a checkpoint may have for nobody
        self.attention_names: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj")  # what the checkpoint calls these

        self._hf_config, self._max_model_len = hf_config, max_model_len
        own = [name for name in _EPSILONS if hasattr(type(hf_config), name)]  # some checkpoints say others as well, which nobody reads
        self._eps = float(next(filter(None, map(self.config.get, own or _EPSILONS)), 0.0))
        self._ops: list[Op] = []
        self._widths: dict[str, int] = {}  # of the buffers so far
        self._weights: dict[str, tuple[int, ...]] = {}
        self._inputs: dict[str, int] = {}
        self._kv_layers: list[KVLayerSpec] = []
        self._caches: dict[int, int] = {}  # layer of the model -> of the cache
        self._state_layers: list[StateLayerSpec] = []
        self._slices: dict[str, RowsOf] = {}
        self.ropes: dict[str, RopeTable] = {}

    # What the config says.

    def flag(self, setting: str) -> bool:
        return bool(self.config.get(setting))

    def own(self, setting: str, usual: Any) -> Any:
        """What the config says of a setting that its class knows: of others, which nobody reads, a checkpoint may say anything."""
        return self.config[setting] if hasattr(type(self._hf_config), setting) else usual

    def refuse(self, *settings: str) -> None:
        """Raise UnsupportedModel if one of these is set: it has a meaning that the family's program lacks."""
        for setting in settings:
            if self.config.get(setting):
                raise UnsupportedModel(f"{setting} {self.config[setting]!r}")

    def window(self) -> int | None:
        """Positions that a sliding layer sees; None = all."""
        window = self.config.get("sliding_window")
        if window is not None and window < 1:
            raise UnsupportedModel(f"sliding window {window}")
        return window

    def layer_types(self, other: str = "sliding_attention") -> list[str]:
        """full_attention or another type, for each layer. If any slides, there is a window."""
        types = self.config.get("layer_types")
        if types is None or len(types) != self.num_layers or not {*types} <= {"full_attention", other}:
            raise UnsupportedModel(f"layer types {types}")
        if "sliding_attention" in types and self.window() is None:
            raise UnsupportedModel("sliding layers without a window")
        return types

    def windows(self) -> list[int | None]:
        """What each layer sees, by its type."""
        return [self.window() if kind == "sliding_attention" else None for kind in self.layer_types()]

    def rope(self, layer_type: str | None = None, partial: bool = False, grows: bool = False) -> str:
        """Name of the rotary table: one for all layers, or one for each type.

        partial: it may leave the end of a head alone. grows: queries grow with their positions, as the config says.
        """
        name = layer_type or "rope"
        table = rope_table(self._hf_config, self.head_dim, self._max_model_len, layer_type)
        if grows:
            rope = self.config["rope_parameters"]
            table = replace(table, growth=(float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"])))
        self.ropes[name] = table
        if 2 * len(table.inv_freq) != self.head_dim and not partial:
            raise UnsupportedModel("partial rotary embedding")
        return name

    def width(self, x: str) -> int:
        """Columns of a buffer."""
        return self._widths[x]

    # Ops.

    def input(self, name: str, width: int) -> str:
        """A buffer that the caller fills."""
        self._inputs[name] = self._widths[name] = width
        return name

    def embed(
        self, scale: float = 1.0, weight: str = _EMBEDDING, rows: int | None = None, output: str | None = None, width: int = 0
    ) -> str:
        """Boundary 0, unless it has an output of its own. rows: of the weight, None = vocab_size. width: 0 = hidden_size."""
        self.weight(weight, self.vocab_size if rows is None else rows, width or self.hidden_size)
        return self._append(Embed((), (output or hidden(0),), weight, scale), width or self.hidden_size)

    def norm(self, name: str, x: str, output: str = "", groups: int = 1, eps: float | None = None, weight: str = "weight") -> str:
        """name "" = one without a weight; eps None = the config's. weight: what the checkpoint calls it."""
        width = self._widths[x]
        weight = self.weight(f"{name}.{weight}", width) if name else ""
        bias = self.weight(f"{name}.bias", width) if name and self.norm_biases else ""
        eps = self._eps if eps is None else eps
        op = RMSNorm((x,), (output or name,), weight, eps, bias, self.norms_add_one, self.layer_norms, groups)
        return self._append(op, width)

    def linear(self, name: str, x: str, width: int, bias: bool = False) -> str:
        weight = self.weight(f"{name}.weight", width, self._widths[x])
        biases = (self.weight(f"{name}.bias", width),) if bias else ()
        return self._append(Linear((x,), (name,), (weight,), biases), width)

    def add(self, x: str, y: str, output: str) -> str:
        return self._append(Add((x, y), (output,)), self._widths[x])

    def local_conv(self, name: str, x: str, kernels: str, taps: int, side: int) -> str:
        """One of the two convolutions around a sublayer, 0 before it and 1 behind it."""
        weight = self.weight(f"{name}.base_kernel", 2, taps, self._widths[x])
        return self._append(LocalConv((x, kernels), (f"{name}.{side}",), weight, side), self._widths[x])

    def concat(self, parts: tuple[str, ...], output: str, groups: int = 1) -> str:
        return self._append(Concat(parts, (output,), groups), sum(self._widths[part] for part in parts))

    def activate(self, parts: tuple[str] | tuple[str, str], output: str, width: int) -> str:
        """function(gate) * up, of one buffer or of two."""
        return self._append(Activation(parts, (output,), self._function(), gated=True), width)

    def scale_by(self, x: str, weight: str, output: str) -> str:
        """Times a weight of one number."""
        return self._append(Scale((x,), (output,), 1.0, self.weight(weight, 1)), self._widths[x])

    def scale(self, x: str, factor: float, output: str = "") -> str:
        return x if factor == 1.0 else self._append(Scale((x,), (output or f"{x}.scaled",), factor), self._widths[x])

    def softcap(self, x: str, cap: float | None) -> str:
        return x if cap is None else self._append(Softcap((x,), (f"{x}.capped",), cap), self._widths[x])

    def rounded(self, number: float) -> float:
        """As it is in the format of the weights, where the network was trained with that: 55.5 for 55.4256 in bfloat16."""
        return float(torch.tensor(number, dtype=self.dtype))

    def weight(self, name: str, *shape: int) -> str:
        self._weights[name] = shape
        return name

    def parts(self, name: str, runs: int, sizes: tuple[int, ...], columns: int) -> list[str]:
        """Weights name.0, name.1, ...: of the tensor name.weight, in which their rows lie side by side in runs of these sizes."""
        found: list[str] = []
        for index, size in enumerate(sizes):
            start = sum(sizes[:index])
            rows = RowsOf(f"{name}.weight", (runs * sum(sizes), columns), runs, start, start + size)
            found.append(self.part(f"{name}.{index}", rows, runs * size, columns))
        return found

    def part(self, weight: str, rows: RowsOf, *shape: int) -> str:
        self._slices[weight] = rows
        return self.weight(weight, *shape)

    def product(self, x: str, weights: tuple[str, ...], output: str, biases: tuple[str, ...] = ()) -> str:
        """By weights that have been named, side by side."""
        return self._append(Linear((x,), (output,), weights, biases), sum(self._weights[weight][0] for weight in weights))

    def block_product(self, x: str, weight: str, output: str, groups: int) -> str:
        """Of each of so many runs of columns by rows of its own of a weight that has been named."""
        return self._append(BlockLinear((x,), (output,), weight, groups), self._weights[weight][0])

    def also(self, weight: str, tensor: str) -> None:
        """Some checkpoints have this weight under another name."""
        shape = self._weights[weight]
        self._slices[weight] = RowsOf(tensor, shape, 1, 0, shape[0])

    def _append(self, op: Op, width: int) -> str:
        self._ops.append(op)
        self._widths[op.outputs[0]] = width
        return op.outputs[0]

    # Parts of layer i.

    def qkv(self, i: int, x: str, bias: bool = False) -> tuple[str, str, str]:
        """Queries, keys and values from a weight each."""
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        name = f"{layer(i)}.{self.attention_name}"
        q, k = self.linear(f"{name}.q_proj", x, q_width, bias), self.linear(f"{name}.k_proj", x, kv_width, bias)
        return q, k, self.linear(f"{name}.v_proj", x, kv_width, bias)

    def normed_qkv(self, i: int, x: str, bias: bool = False) -> tuple[str, str, str]:
        """The same with a norm over all of q, and one over all of k."""
        q, k, v = self.qkv(i, x, bias)
        return self.norm(f"{layer(i)}.self_attn.q_norm", q), self.norm(f"{layer(i)}.self_attn.k_norm", k), v

    def attend(
        self,
        i: int,
        qkv: tuple[str, ...],
        rope: str,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        head_norms: bool = False,
        bias: bool = False,
        gate: str = "",
        norm_last: bool = False,
        sinks: bool = False,
        keys_of: int | None = None,
    ) -> str:
        """Attention and the projection behind it, which may have a bias.

        rope "" = no rotation; scale None = 1 / sqrt(head_dim); head_norms: q and k are normalised head by head, norm_last: behind the
        rotation; gate: a buffer by whose sigmoid what is attended to is multiplied, "" = none; sinks: each head has one; keys_of: the layer
        whose keys and values these are, None = its own. They are written to that layer's cache once more, as what they are.
        """
        if norm_last and rope and self.ropes[rope].attention_factor != 1.0:
            raise UnsupportedModel("norms behind a rotation that changes lengths")
        name, owner = f"{layer(i)}.{self.attention_name}", i if keys_of is None else keys_of
        q_norm, k_norm, projection = self.attention_names
        op = Attention(
            inputs=qkv,
            outputs=(name,),
            layer=self._caches.setdefault(owner, len(self._kv_layers)),
            num_heads=self.num_heads,
            scale=self.head_dim**-0.5 if scale is None else scale,
            rope=rope,
            softcap=softcap,
            q_norm=self.weight(f"{name}.{q_norm}.weight", self.head_dim) if head_norms else "",
            k_norm=self.weight(f"{layer(owner)}.self_attn.{k_norm}.weight", self.head_dim) if head_norms else "",
            norm_eps=self._eps,
            norm_add_one=self.norms_add_one,
            norm_last=norm_last,
            sinks=self.weight(f"{name}.sinks", self.num_heads) if sinks else "",
        )
        if keys_of is None:
            self._kv_layers.append(KVLayerSpec(self.num_kv_heads, self.head_dim, self.head_dim, window))
        attended = self._append(op, self.num_heads * self.head_dim)
        if gate:
            attended = self.gate(gate, attended)
        return self.linear(f"{name}.{projection}", attended, self.hidden_size, bias)

    def attend_elsewhere(self, i: int, q: str, cache_layer: int, rope: str, scale: float) -> str:
        """Attention to what another network has written, of queries that are normalised head by head, and the projection behind it.

        cache_layer: of that network's cache, which is the program's, too.
        """
        name = f"{layer(i)}.{self.attention_name}"
        q_norm, _, projection = self.attention_names
        norm = self.weight(f"{name}.{q_norm}.weight", self.head_dim)
        op = Attention((q,), (name,), cache_layer, self.num_heads, scale, rope, q_norm=norm, norm_eps=self._eps, frozen=True)
        return self.linear(f"{name}.{projection}", self._append(op, self.num_heads * self.head_dim), self.hidden_size)

    def attend_over(self, cache: KVLayerSpec, op: Attention) -> str:
        """Attention alone, whatever it is like, over the next layer of the cache."""
        op = replace(op, layer=len(self._kv_layers))
        self._kv_layers.append(cache)
        return self._append(op, op.num_heads * cache.v_dim)

    def write(self, kv: tuple[str, ...], op: Attention) -> None:
        """Keys and values alone, for this attention of another program."""
        if op.k_norm:
            self.weight(op.k_norm, self.head_dim)
        self._ops.append(replace(op, inputs=kv, outputs=(), num_heads=0, q_norm=""))

    def gate(self, gate: str, x: str) -> str:
        """sigmoid(gate) * x."""
        return self._append(Activation((gate, x), (f"{x}.gated",), "sigmoid", gated=True), self._widths[x])

    def gated_qkv(self, i: int, x: str, bias: bool = False) -> tuple[tuple[str, str, str], str]:
        """Queries, keys and values, and a gate for what is attended to: head by head in one weight with the queries."""
        if bias:
            raise UnsupportedModel("attention_bias with a gate")
        name, kv_width = f"{layer(i)}.self_attn", self.num_kv_heads * self.head_dim
        parts = self.parts(f"{name}.q_proj", self.num_heads, (self.head_dim, self.head_dim), self._widths[x])
        q, gate = (self.product(x, (part,), f"{name}.{what}") for part, what in zip(parts, ("q", "gate"), strict=True))
        return (q, self.linear(f"{name}.k_proj", x, kv_width), self.linear(f"{name}.v_proj", x, kv_width)), gate

    def mlp(self, i: int, x: str, bias: bool = False) -> str:
        """A gated MLP (Shazeer 2020), gate and up from a weight each."""
        return self.gated_mlp(f"{layer(i)}.mlp", x, self.intermediate_size, bias)

    def plain_mlp(
        self, name: str, x: str, width: int, bias: bool = False, names: tuple[str, str] = ("up_proj", "down_proj"), function: str = ""
    ) -> str:
        """An MLP without a gate. function "": the config's."""
        up, down = names
        op = Activation((self.linear(f"{name}.{up}", x, width, bias),), (f"{name}.act",), function or self._function(), gated=False)
        return self.linear(f"{name}.{down}", self._append(op, width), self._widths[x], bias)

    def gated_mlp(
        self, name: str, x: str, width: int, bias: bool = False, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> str:
        gate, up, down = names
        gate_up = self.linear(f"{name}.{gate}", x, width, bias), self.linear(f"{name}.{up}", x, width, bias)
        return self.gated(name, gate_up, width, bias, down)

    def gated(self, name: str, gate_up: tuple[str] | tuple[str, str], width: int, bias: bool = False, down: str = "down_proj") -> str:
        """function(gate) * up, and the projection behind it, which may have a bias."""
        return self.linear(f"{name}.{down}", self.activate(gate_up, f"{name}.act", width), self.hidden_size, bias)

    def experts(
        self,
        name: str,
        x: str,
        count: int,
        width: int,
        renormalise: bool,
        parts: tuple[str, str, str],
        fused: str | None = None,
        tensors: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
        router: str = "gate",
        score: Literal["softmax", "sigmoid"] = "softmax",
        correction: str = "",
        groups: tuple[int, int] = (1, 1),
        scale: float = 1.0,
        scales: str = "",
        function: str = "",
        read: str | None = None,
    ) -> str:
        """Experts of this width and the router that chooses among them. parts: what gate, up and down of an expert are called.

        fused: what a checkpoint calls the block that has the experts in two tensors, gate and up together; None = the same. tensors: what
        it calls those. correction, scales: what it calls these, "" = none; groups: how many there are and of how many a token has experts.
        function: "" = the config's; read: what the experts read, None = x.
        """
        fused, read = fused or name, read or x
        inputs = self._widths[read]
        names = [[f"{name}.experts.{expert}.{part}.weight" for expert in range(count)] for part in parts]
        gates, ups = (tuple(self.weight(weight, width, inputs) for weight in some) for some in names[:2])
        downs = tuple(self.weight(weight, inputs, width) for weight in names[2])
        for expert, (gate, up, down) in enumerate(zip(gates, ups, downs, strict=True)):
            rows = width if gate == up else 2 * width
            both = (f"{fused}.{tensors[0]}", (count, rows, inputs), 1)
            self._slices[gate] = RowsOf(*both, expert * rows, expert * rows + width)
            self._slices[up] = RowsOf(*both, (expert + 1) * rows - width, (expert + 1) * rows)
            self._slices[down] = RowsOf(f"{fused}.{tensors[1]}", (count, inputs, width), 1, expert * inputs, (expert + 1) * inputs)
        scores = self.linear(f"{name}.{router}", x, count)
        corrected, scaled = (self.weight(f"{name}.{what}", count) if what else "" for what in (correction, scales))
        if fused != name:
            for weight in filter(None, (f"{router}.weight", correction)):
                self.also(f"{name}.{weight}", f"{fused}.{weight}")
        top = self._top(count)
        op = Experts(
            (read, scores), (f"{name}.experts",), gates, ups, downs, function or self._function(), top, renormalise, score=score,
            correction=corrected, num_groups=groups[0], top_groups=groups[1], scale=scale, scales=scaled,
        )
        return self._append(op, inputs)

    def biased_experts(self, name: str, x: str, count: int, width: int) -> str:
        """Experts and router with biases, in two tensors [experts, in, out], gate and up column by column in turn (gpt-oss)."""
        inputs, fused = self._widths[x], f"{name}.experts"
        gates, ups, downs = ([f"{fused}.{expert}.{part}" for expert in range(count)] for part in ("gate", "up", "down"))
        for some, first in ((gates, 0), (ups, 1), (downs, 0)):
            tensor, rows, columns = ("down", inputs, width) if some is downs else ("gate_up", 2 * width, inputs)
            step = 2 if tensor == "gate_up" else 1
            for expert, weight in enumerate(some):
                start, stop = expert * rows + first, (expert + 1) * rows
                self.weight(weight, rows // step, columns)
                self._slices[weight] = RowsOf(f"{fused}.{tensor}_proj", (count, columns, rows), 1, start, stop, step=step, transposed=True)
        top = self._top(count)
        biases = self.weight(f"{fused}.gate_up_proj_bias", count, 2 * width), self.weight(f"{fused}.down_proj_bias", count, inputs)
        scores = self.linear(f"{name}.router", x, count, bias=True)
        op = Experts((x, scores), (f"{fused}.mixed",), tuple(gates), tuple(ups), tuple(downs), CLAMPED, top, True, biases)
        return self._append(op, inputs)

    def _top(self, count: int) -> int:
        """How many of so many experts a row has."""
        top = int(self.config["num_experts_per_tok"])
        if not 0 < top <= count:
            raise UnsupportedModel(f"{top} of {count} experts")
        return top

    def shared_expert(self, name: str, x: str, width: int) -> str:
        """An expert that every token has, as much of it as a gate says."""
        gate = self.linear(f"{name}.shared_expert_gate", x, 1)
        return self.gate(gate, self.gated_mlp(f"{name}.shared_expert", x, width))

    def _function(self) -> str:
        function = self.config[self.activation_setting]
        if function not in _ACTIVATIONS:
            raise UnsupportedModel(f"activation {function!r}")
        return _ACTIVATIONS[function]

    def finish(
        self, x: str, scale: float = 1.0, softcap: float | None = None, norm: str = "model.norm", head_bias: bool = False
    ) -> Program:
        """The last norm and the logits: the program is complete."""
        final = self.norm(norm, x)
        lm_head = _EMBEDDING if self.flag("tie_word_embeddings") else "lm_head.weight"
        return self.program(final, self.logits(final, lm_head, self.vocab_size, scale, softcap, "lm_head.bias" if head_bias else ""))

    def logits(self, x: str, weight: str, rows: int, scale: float = 1.0, softcap: float | None = None, bias: str = "") -> str:
        """Scores of the rows that want them, from the weight [rows, width of x]; bias: a weight's name, "" = none."""
        wanted = self._append(GatherRows((x,), ("final.rows",)), self._widths[x])
        biases = (self.weight(bias, rows),) if bias else ()
        logits = self._append(Linear((wanted,), ("logits",), (self.weight(weight, rows, self._widths[x]),), biases), rows)
        return self.softcap(self.scale(logits, scale), softcap)

    def program(self, final: str, logits: str) -> Program:
        """Everything so far, and the best of each row of logits."""
        best = ArgMax((logits,), ("argmax", "top"))
        return Program(
            ops=(*self._ops, best),
            weights=self._weights,
            kv_layers=tuple(self._kv_layers),
            ropes=self.ropes,
            vocab_size=self._widths[logits],
            max_model_len=self._max_model_len,
            boundaries=tuple(hidden(i) for i in range(self.num_layers + 1)),
            final=final,
            logits=logits,
            best=best,
            inputs=self._inputs,
            state_layers=tuple(self._state_layers),
            slices=self._slices,
            unread=frozenset(self.unread),
        )


def layer(i: int) -> str:
    """What the checkpoint calls layer i."""
    return f"model.layers.{i}"


def hidden(i: int) -> str:
    """Boundary i: the buffer that layer i reads and layer i - 1 writes."""
    return f"hidden.{i}"
