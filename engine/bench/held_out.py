"""The text that the quality of a network is measured on: documents and conversations, as its tokenizer reads them.

Knows no network. The package brings a text of its own, written for this and seen by no model in training.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError

HELD_OUT = Path(__file__).parent.parent / "demo_model" / "held_out.md"
SEPARATOR = "\n---\n"  # between documents
STRETCH, OPENING = 256, 32  # plain text: of every 256 tokens the first 32 are a prompt

Message = dict[str, str]


@dataclass(frozen=True)
class Sample:
    """The text as one model reads it."""

    windows: list[list[int]]  # the whole text, cut where a context is full
    prompts: list[list[int]]


def read_sample(tokenizer: PreTrainedTokenizerBase, text: str, context: int, num_prompts: int, prompt_tokens: int) -> Sample:
    """Windows of at most `context` tokens, prompts of at most `prompt_tokens`: their ends. Raises ConfigError for too little text."""
    tokens: list[int] = []
    prompts: list[list[int]] = []
    for document in text.split(SEPARATOR):
        messages = read_conversation(document) if tokenizer.chat_template else None
        if messages is None:
            plain = tokenizer.encode(document.strip() + "\n\n")
            prompts += [plain[i : i + OPENING] for i in range(0, len(plain) - OPENING, STRETCH)]
            tokens += plain
        else:
            turns = [i + 1 for i, message in enumerate(messages) if message["role"] == "user"]
            prompts += [_render(tokenizer, messages[:turn], answers=True) for turn in turns]
            tokens += _render(tokenizer, messages)
    windows = [window for i in range(0, len(tokens), context) if len(window := tokens[i : i + context]) > 1]
    if not prompts or not windows or prompt_tokens < 1:
        raise ConfigError("text or context is too short; some thousand tokens read 1,024 at a time tell formats apart")
    spread = prompts[:: max(1, len(prompts) // num_prompts)][:num_prompts]  # evenly, so that every source is asked
    return Sample(windows, [prompt[-prompt_tokens:] for prompt in spread])


def read_conversation(document: str) -> list[Message] | None:
    """Its turns, or None for plain text. "user: Hi\\nassistant: Hello" -> two messages."""
    messages: list[Message] = []
    for line in document.strip().splitlines():
        role, colon, rest = line.partition(": ")
        if colon and role in ("user", "assistant"):
            messages.append({"role": role, "content": rest})
        elif not messages:
            return None
        else:
            messages[-1]["content"] += f"\n{line}"
    return messages or None


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], answers: bool = False) -> list[int]:
    """answers: the model is to speak next."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answers)
    return tokenizer.encode(str(text), add_special_tokens=False)  # the template writes them itself
