"""Tokenizers compared: whether two read text as the same ids, which of their tokens are the same, and a draft moved from one to another.

Knows no proposer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..kernels.ops import Embed, Linear, Op
from ..kernels.program import Program
from .config_entry import SpeculativeConfigError

SMALLEST_SHARE = 0.1
"""Of the target's tokens that a draft of another vocabulary must be able to guess."""


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Raises SpeculativeConfigError if there is none, or a damaged one."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged tokenizer.json
        raise SpeculativeConfigError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def check_vocabularies(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, instead: str = "") -> None:
    """Raise SpeculativeConfigError if the two would read one text as different ids, naming the first difference.

    instead: what else can be done than to take another draft.
    """
    if difference := first_difference(target, draft):
        hint = "a draft model needs the target's own vocabulary; take one of the same family"
        raise SpeculativeConfigError(f"{difference}: {hint}{instead}")


def first_difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """What makes the two read one text as different ids; None if nothing does.

    Tokenizers are compared, not configs: embedding tables are padded (Qwen2.5 has 151,936 and 152,064 rows for the same ids).
    """
    theirs, ours = ({token_id: token for token, token_id in t.get_vocab().items()} for t in (target, draft))
    for token_id in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token_id) != ours.get(token_id):
            said, guessed = _named(theirs.get(token_id)), _named(ours.get(token_id))
            return f"token id {token_id} is {said} in the target and {guessed} in the draft"
    if isinstance(target, PreTrainedTokenizerFast) and isinstance(draft, PreTrainedTokenizerFast):
        added_theirs, added_ours = target.get_added_vocab(), draft.get_added_vocab()
        if differing := sorted(added_theirs.keys() ^ added_ours.keys()):
            side = "target" if differing[0] in added_theirs else "draft"
            return f"token {differing[0]!r} is an added token in the {side} only"
        rules_theirs, rules_ours = _merges(target), _merges(draft)
        if rules_theirs != rules_ours:
            rank = next(i for i, (a, b) in enumerate(zip([*rules_theirs, None], [*rules_ours, None], strict=False)) if a != b)
            said, guessed = (" + ".join(rules[rank]) if rank < len(rules) else "missing" for rules in (rules_theirs, rules_ours))
            return f"merge {rank} is {said!r} in the target and {guessed!r} in the draft"
    return None


@dataclass(frozen=True)
class Intersection:
    """Tokens that stand for the same bytes in both vocabularies, in the order of the target's ids."""

    target_ids: Tensor  # [I] int64
    draft_ids: Tensor  # [I] int64
    read_as: Tensor  # [target's vocab_size] int64, draft id that each target token is read as; unknown ones as one filler

    @classmethod
    def of(cls, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, vocab_size: int) -> Intersection:
        """vocab_size: the target's, width of its logits. Special tokens are left out: equal names may mean different things."""
        theirs, ours = _byte_strings(target), _byte_strings(draft)
        pairs = sorted((theirs[text], ours[text]) for text in theirs.keys() & ours.keys() if theirs[text] < vocab_size)
        if len(pairs) < SMALLEST_SHARE * len(target):
            raise SpeculativeConfigError(
                f"only {len(pairs):,} of the target's {len(target):,} tokens are in the draft's vocabulary too; take a draft of a "
                "closer family, or heterogeneous_vocab 'retokenize'"
            )
        target_ids, draft_ids = torch.tensor(pairs).t().contiguous()
        filler = next((i for i in (draft.unk_token_id, draft.eos_token_id) if isinstance(i, int)), 0)
        read_as = torch.full((vocab_size,), filler, dtype=torch.int64)
        read_as[target_ids] = draft_ids
        return cls(target_ids, draft_ids, read_as)


def transplanted(program: Program, weights: Mapping[str, Tensor], tokens: Intersection) -> tuple[Program, dict[str, Tensor]]:
    """The draft's network reading and guessing the target's ids: embedding rows in their order, the head cut to common tokens.

    So a draft of another vocabulary is a draft like any other, and the distribution it guesses from is its own, renormalised
    over the tokens that both have (token-level intersection, Timor et al. 2025). Raises SpeculativeConfigError for a head with a bias.
    """
    written_by: dict[str, Op] = {name: op for op in program.ops for name in op.outputs}
    head = written_by[program.logits]
    while not isinstance(head, Linear):
        head = written_by[next(iter(head.inputs))]  # a scale or a cap behind it
    embed = next(op for op in program.ops if isinstance(op, Embed))
    if any(head.biases):
        raise SpeculativeConfigError("a draft whose output layer has a bias cannot be read in another vocabulary")
    names = {"embed": "transplanted.embed", "head": "transplanted.head", "map": "transplanted.token_ids"}
    moved = {
        names["embed"]: weights[embed.weight][tokens.read_as],
        names["head"]: weights[head.weights[0]][tokens.draft_ids],
        names["map"]: tokens.target_ids,
    }
    replaced: dict[int, Op] = {
        id(embed): dataclasses.replace(embed, weight=names["embed"]),
        id(head): dataclasses.replace(head, weights=(names["head"],), biases=()),
    }
    kept = {name: shape for name, shape in program.weights.items() if name not in (embed.weight, head.weights[0])}
    made = dataclasses.replace(
        program,
        ops=tuple(replaced.get(id(op), op) for op in program.ops),
        weights=kept | {name: tuple(tensor.shape) for name, tensor in moved.items()},
        vocab_size=len(tokens.target_ids),
        token_map=names["map"],
    )
    return made, {name: weights[name] for name in kept} | moved


def _byte_strings(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """The bytes that each ordinary token stands for -> its id, the lowest among equals."""
    named: Any = tokenizer  # transformers writes its attributes into a table of any type
    special: set[int] = {*named.all_special_ids, *named.get_added_vocab().values()}
    marker = space_marker(tokenizer)
    letters = byte_letters() if marker == "Ġ" else None
    found: dict[bytes, int] = {}
    escaped: dict[bytes, int] = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if token_id in special:
            continue
        if letters is None and _ESCAPED_BYTE.fullmatch(token):
            escaped[bytes.fromhex(token[3:5])] = token_id
            continue
        if letters is None:
            text = token.replace(marker, " ").encode() if marker else token.encode()
        elif all(letter in letters for letter in token):
            text = bytes(letters[letter] for letter in token)
        else:
            continue
        found.setdefault(text, token_id)
    return escaped | found  # said only where a byte has no token of its own


_ESCAPED_BYTE = re.compile("<0x[0-9A-F]{2}>")


def space_marker(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the tokenizer writes for a space in front of a word: `Ġ` where tokens are bytes, `▁` in sentencepiece."""
    names = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    joined = "".join(names[token_id] for token_id in tokenizer.encode(" a", add_special_tokens=False))
    return joined[0] if joined.endswith("a") and len(joined) > 1 else ""


@cache
def byte_letters() -> dict[str, int]:
    """Letter -> byte of byte-level vocabularies (GPT-2): printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def _named(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def _merges(tokenizer: PreTrainedTokenizerFast) -> list[list[str]]:
    """Pairs in order of rank; none for models that do not merge."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])]
