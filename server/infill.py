"""Prompts of models that were taught to write what stands between two texts: fill in the middle (Bavarian et al. 2022)."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

# Before the text that comes first, before the one behind the gap, before what fills it.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code, Mellum
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM, as Zed asks it; no card of these says it
)
# Those that read the text behind the gap first, and go on from the other.
_SUFFIX_FIRST = (
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
# What such models write where the middle ends, instead of an end of text: padding, or a next file.
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<repo_name>", "<file_sep>")


@dataclass(frozen=True)
class Infill:
    """How one model is asked to fill a gap."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool
    ends: tuple[int, ...]  # tokens that end the middle

    def prompt(self, before: str, after: str) -> str:
        first, second = self.prefix + before, self.suffix + after
        return (second + first if self.suffix_first else first + second) + self.middle


def infill_of(tokenizer: PreTrainedTokenizerBase) -> Infill | None:
    """None: the vocabulary has no tokens for it."""

    def found(token: str) -> int | None:
        index = tokenizer.convert_tokens_to_ids(token)
        return index if isinstance(index, int) and tokenizer.convert_ids_to_tokens(index) == token else None

    ends = tuple(index for token in _ENDS if (index := found(token)) is not None)
    for marks in (*_MARKS, *_SUFFIX_FIRST):
        if all(mark == "" or found(mark) is not None for mark in marks):
            return Infill(*marks, marks in _SUFFIX_FIRST, ends)
    return None
