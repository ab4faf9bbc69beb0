"""The embedded model's tokenizer with grammars over it, and masks as sets of ids."""

import functools
from collections.abc import Sequence

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foretoken.engine.default_speculation import DEMO_DRAFT
from foretoken.engine.grammar import CompiledGrammar, GrammarState
from foretoken.engine.grammar_compiler import GrammarCompiler
from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.engine.token_mask import Mask

PADDING = 70
"""By how much the logits are wider than the vocabulary."""


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_DRAFT)


def end_id() -> int:
    end = tokenizer().eos_token_id
    assert isinstance(end, int)
    return end


def vocab_size() -> int:
    return len(tokenizer()) + PADDING


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), vocab_size(), [end_id()], deadline_s=60.0)


def compiled(spec: GrammarSpec) -> CompiledGrammar:
    return compiler().compile(spec)


def ids(mask: Mask | None) -> list[int]:
    assert mask is not None
    return np.flatnonzero(mask.to_bool(vocab_size())).tolist()


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def fresh_mask(grammar: CompiledGrammar, tokens: Sequence[int]) -> list[int]:
    """The mask behind these tokens, by a matcher that has read nothing else."""
    return ids(grammar.open(()).mask(tokens))


def opened(spec: GrammarSpec, prompt: Sequence[int] = (5, 6)) -> tuple[GrammarState, list[int]]:
    """A state, and the live token list that it follows."""
    tokens = list(prompt)
    return compiled(spec).open(tokens), tokens


def accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether the output may be this text, as the tokenizer spells it or otherwise."""
    state, tokens = opened(spec)
    for token in encode(text):
        mask = state.mask(())
        if mask is None or not mask.allows(token):
            return False
        tokens.append(token)
    mask = state.mask(())
    return mask is not None and mask.allows(end_id())
