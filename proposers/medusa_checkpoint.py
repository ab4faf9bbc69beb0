"""Medusa heads as they are published: which tensors of a folder are whose, and whether they fit the target.

Heads are counted from the tensors, because published configs say 2 where the file has 5. Knows no program.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Checkpoint, check_token_map
from .config_entry import SpeculativeConfigError
from .loading import TargetView

_FASTER_DECODING = re.compile(r"^(?P<prefix>(?:medusa_heads?\.)?)(?P<head>\d+)\.(?P<layer>\d+)\.linear\.weight$")
_VLLM = re.compile(r"^(?P<prefix>(?:medusa_heads?\.)?)blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.weight$")
_LAYOUTS = {"FasterDecoding": _FASTER_DECODING, "vLLM": _VLLM}
_MEDUSA = re.compile(r"^(?:medusa_heads?\.|blocks\.|lm_heads\.|\d+\.)|^token_map$")


@dataclass(frozen=True)
class MedusaHeads:
    """The heads of one folder. A head is some layers [H, H] and an output layer [V, H], its own, all heads' or the target's."""

    checkpoint: Checkpoint
    layout: str
    width: int  # H
    layers: tuple[tuple[tuple[str, str], ...], ...]  # of each head: names of weight and bias ("" = none), first layer first
    outputs: tuple[str, ...]  # name of each head's output layer, one for all, or () for the target's
    vocab_size: int  # rows of the output layers
    token_ids: Tensor | None  # [vocab_size] token id of each row; None = the row itself

    @property
    def num_heads(self) -> int:
        return len(self.layers)

    @property
    def has_one_output(self) -> bool:
        """Whether all heads share their output layer."""
        return len(self.outputs) < 2

    def blocks(self, num_heads: int) -> dict[str, Tensor]:
        """The layers' tensors of the first heads by name. Raises SpeculativeConfigError."""
        taken: dict[str, Tensor] = {}
        for layers in self.layers[:num_heads]:
            for weight, bias in layers:
                taken[weight] = self.checkpoint.take(weight, self.width, self.width)
                if bias:
                    taken[bias] = self.checkpoint.take(bias, self.width)
        return taken

    def output(self, head: int) -> Tensor | None:
        """[vocab_size, H] of head `head` (0 if there is one for all); None = the target's. Raises SpeculativeConfigError."""
        return self.checkpoint.take(self.outputs[head], self.vocab_size, self.width) if self.outputs else None

    def ignore_rest(self, num_heads: int) -> None:
        """Heads that are not asked for are no surprise."""
        for head in range(num_heads, self.num_heads):
            self.checkpoint.ignore(*(name for pair in self.layers[head] for name in pair), *self.outputs[head : head + 1])

    def describe(self, num_heads: int) -> str:
        depth = len(self.layers[0])
        output = "the target's" if not self.outputs else "one of their own for all" if self.has_one_output else "their own"
        known = "" if self.token_ids is None else f" of {self.vocab_size} tokens"
        return (
            f"{num_heads} of {self.num_heads} heads of {depth} layer{'s' * (depth > 1)} in the layout of {self.layout}; "
            f"output layers: {output}{known}"
        )


def read_heads(folder: Path, target: TargetView) -> MedusaHeads:
    """Raises SpeculativeConfigError if there are none, or if they were made for another target."""
    checkpoint = Checkpoint(folder)
    names = checkpoint.names
    layout, prefix, layers = _layers(checkpoint)
    # A whole model with heads (Medusa-2) has tensors that are none of our business: its own lm_head among them.
    others = {name for name in names if not _MEDUSA.match(name)}
    is_whole_model = any(name.startswith("model.") for name in others)
    if is_whole_model:
        checkpoint.ignore(*others)
    width = checkpoint.shape(layers[0][0][0])[-1]
    if width != target.hidden_size:
        raise SpeculativeConfigError(
            f"the Medusa heads in {folder} read states of width {width}, but the target's have {target.hidden_size}: "
            "they were trained for another model"
        )
    outputs = _outputs(checkpoint, layout, prefix, layers, is_whole_model)
    rows = checkpoint.shape(outputs[0])[0] if outputs else target.vocab_size
    token_ids = _token_ids(checkpoint, prefix, target.vocab_size) if outputs else None
    wanted = target.vocab_size if token_ids is None else len(token_ids)
    if token_ids is None and checkpoint.config.get("truncated_vocab_size") == rows < wanted:
        wanted = rows  # the first so many tokens
    if rows != wanted:
        whose = f"{wanted} entries of its token_map" if token_ids is not None else f"{wanted} tokens of the target"
        raise SpeculativeConfigError(f"{outputs[0]!r} in {folder} scores {rows} tokens, which does not fit the {whose}")
    return MedusaHeads(checkpoint, layout, width, layers, outputs, rows, token_ids)


def _layers(checkpoint: Checkpoint) -> tuple[str, str, tuple[tuple[tuple[str, str], ...], ...]]:
    """(layout, prefix, names of the layers' weights and biases)."""
    for layout, pattern in _LAYOUTS.items():
        matches = [match for name in checkpoint.names if (match := pattern.match(name))]
        if not matches:
            continue
        prefix = matches[0]["prefix"]
        places = {(int(match["head"]), int(match["layer"])): match[0] for match in matches}
        num_heads, num_layers = (1 + max(place[axis] for place in places) for axis in (0, 1))
        missing = [(head, layer) for head in range(num_heads) for layer in range(num_layers) if (head, layer) not in places]
        if missing or len(matches) > len(places):
            raise SpeculativeConfigError(
                f"the Medusa heads in {checkpoint.folder} are incomplete or there twice: "
                + (f"head {missing[0][0]} has no layer {missing[0][1]}" if missing else "one prefix is wanted")
            )

        def named(head: int, layer: int, places: dict[tuple[int, int], str] = places) -> tuple[str, str]:
            weight = places[head, layer]
            bias = weight.removesuffix("weight") + "bias"
            return weight, bias if checkpoint.has(bias) else ""

        return layout, prefix, tuple(tuple(named(head, layer) for layer in range(num_layers)) for head in range(num_heads))
    raise SpeculativeConfigError(
        f"{checkpoint.folder} holds no Medusa heads: none of its tensors is named like 'medusa_head.0.0.linear.weight' or "
        "'blocks.0.layers.0.weight'; give the folder of the heads as 'model'"
    )


def _outputs(
    checkpoint: Checkpoint, layout: str, prefix: str, layers: tuple[tuple[tuple[str, str], ...], ...], is_whole_model: bool
) -> tuple[str, ...]:
    """Names of the output layers: one a head, one for all, none for the target's."""
    heads = range(len(layers))
    if layout == "FasterDecoding":
        each = [f"{prefix}{head}.{len(layers[0])}.weight" for head in heads]
    else:
        each = [f"{prefix}lm_heads.{head}.weight" for head in heads]
    if any(map(checkpoint.has, each)):
        missing = [name for name in each if not checkpoint.has(name)]
        if missing:
            raise SpeculativeConfigError(f"{checkpoint.folder} has output layers for some of its Medusa heads, but no {missing[0]!r}")
        return tuple(each)
    for_all = checkpoint.find(f"{prefix}lm_head.weight", *([] if is_whole_model else ["lm_head.weight"]))
    return (for_all,) if layout == "vLLM" and for_all else ()


def _token_ids(checkpoint: Checkpoint, prefix: str, vocab_size: int) -> Tensor | None:
    """vLLM's token_map holds token ids, not offsets as EAGLE's d2t."""
    name = checkpoint.find(f"{prefix}token_map", "token_map")
    if name is None:
        return None
    token_ids = checkpoint.take(name, -1)
    return check_token_map(name, token_ids - torch.arange(len(token_ids)), vocab_size)
