"""Prompts of models that were taught to write what stands between two texts: fill in the middle (Bavarian et al. 2022)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from ..engine.request import SamplingParams

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
# Before the name of a repository, and before that of each of its files.
_REPOS = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
# What such models write where the middle ends, instead of an end of text: padding, or a next file.
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", *_REPOS, *_FILES)


@dataclass(frozen=True)
class Infill:
    """How one model is asked to fill a gap."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool
    repo: str  # "" = it has no such token
    file: str
    ends: tuple[int, ...]  # tokens that end the middle

    def prompt(self, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> str:
        """files: names and texts of what else is in the project, as llama.cpp puts them."""
        first, second = self.prefix + before, self.suffix + after
        gap = (second + first if self.suffix_first else first + second) + self.middle
        if not files:
            return gap
        if not self.file:
            return "".join(f"\n\n--- snippet ---\n\n{text}" for _, text in files) + gap
        repo = self.repo and f"{self.repo}myproject\n"
        return repo + "".join(f"{self.file}{name}\n{text}" for name, text in (*files, ("filename", gap)))

    def ending(self, params: SamplingParams) -> SamplingParams:
        """The same, to end with the middle."""
        return params if params.ignore_eos else replace(params, stop_token_ids=[*params.stop_token_ids, *self.ends])


def infill_of(tokenizer: PreTrainedTokenizerBase) -> Infill | None:
    """None: the vocabulary has no tokens for it."""

    def found(token: str) -> int | None:
        index = tokenizer.convert_tokens_to_ids(token)
        return index if isinstance(index, int) and tokenizer.convert_ids_to_tokens(index) == token else None

    def first(tokens: Sequence[str]) -> str:
        return next((token for token in tokens if found(token) is not None), "")

    ends = tuple(index for token in _ENDS if (index := found(token)) is not None)
    for marks in (*_MARKS, *_SUFFIX_FIRST):
        if all(mark == "" or found(mark) is not None for mark in marks):
            return Infill(*marks, marks in _SUFFIX_FIRST, first(_REPOS), first(_FILES), ends)
    return None
