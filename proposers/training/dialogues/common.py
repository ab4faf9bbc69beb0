"""What every builder of dialogues needs: a question with its answer, a fenced block, the usual system messages."""

from random import Random

from ..corpus import Conversation, content_key

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Foretoken, a small and friendly assistant.",
    "Answer briefly.",
    "You are a helpful and honest assistant. Answer the user's question.",
)


def pair(key: int, question: str, answer: str) -> Conversation:
    """One question and its answer. A system message stands before one pair in four, so that either way is familiar."""
    chance = Random(content_key(question) ^ key)
    system = [{"role": "system", "content": chance.choice(SYSTEM_MESSAGES)}] if chance.random() < 0.25 else []
    turns = [{"role": "user", "content": question.strip()}, {"role": "assistant", "content": answer.strip()}]
    return Conversation([*system, *turns], key)


def fenced(language: str, code: str) -> str:
    return f"```{language}\n{code.strip()}\n```"
