"""Text and chats as packed documents: which tokens there are, and which of them an assistant says. Knows no files and no mixture."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from .corpus import Conversation, Message, Record
from .packing import Document
from .tokenizer import END_OF_TEXT, IM_END, IM_START

AnyDocument = Record | Conversation


@dataclass(frozen=True)
class Prompt:
    """A chat up to where the assistant should go on, and how the corpus goes on."""

    messages: list[Message]
    tools: list[Any]
    reference: Message


def encode(documents: Iterable[AnyDocument], tokenizer: PreTrainedTokenizerFast) -> Iterator[Document]:
    """Documents in order, each ended by <|endoftext|>. In plain text everything is learned, in chats what the assistant says."""
    answers = AnswerSpans(tokenizer)
    source = iter(documents)
    while some := tuple(islice(source, 256)):
        texts = [render(document, tokenizer) + END_OF_TEXT for document in some]
        for document, ids in zip(some, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
            token_ids = np.array(ids, dtype=np.uint32)
            learn = np.ones(len(ids), np.uint8) if isinstance(document, Record) else answers.mask(token_ids)
            yield Document(token_ids, learn)


def render(document: AnyDocument, tokenizer: PreTrainedTokenizerFast) -> str:
    if isinstance(document, Record):
        return document.text
    return str(tokenizer.apply_chat_template(document.messages, tools=document.tools or None, tokenize=False))


class AnswerSpans:
    """Finds what the assistant says between the markers of the ChatML template, its end marker included."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        ids: Any = tokenizer.convert_tokens_to_ids([IM_START, IM_END])
        start, end = ids
        self.opening = [start, *tokenizer("assistant\n", add_special_tokens=False)["input_ids"]]
        self.end: int = end

    def mask(self, token_ids: np.ndarray) -> np.ndarray:
        """[L] uint8: 1 where the assistant speaks."""
        mask = np.zeros(len(token_ids), np.uint8)
        width = len(self.opening)
        ends = np.flatnonzero(token_ids == self.end)
        for start in np.flatnonzero(token_ids == self.opening[0]):
            if token_ids[start:start + width].tolist() == self.opening:
                later = ends[ends > start]
                mask[start + width:(later[0] + 1 if len(later) else len(mask))] = 1
        return mask


def prompts(document: Conversation) -> Iterator[Prompt]:
    """One prompt per turn of the assistant."""
    for index, message in enumerate(document.messages):
        if message["role"] == "assistant":
            yield Prompt(document.messages[:index], document.tools, message)


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    text = tokenizer.apply_chat_template(prompt.messages, tools=prompt.tools or None, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])


def texts_of(documents: Iterable[AnyDocument]) -> Iterator[str]:
    """What a tokenizer learns from: text without markers, which must not become ordinary merges."""
    for document in documents:
        if isinstance(document, Record):
            yield document.text
        else:
            calls = (call["function"] for message in document.messages for call in message.get("tool_calls") or ())
            said = (message["content"] or "" for message in document.messages)
            yield "\n".join([*said, *(f'{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}' for call in calls)])
