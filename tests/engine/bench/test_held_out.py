"""A text becomes windows that hold all of it, and prompts."""

import pytest
from transformers import AutoTokenizer

from foretoken.engine.bench.held_out import HELD_OUT, read_conversation, read_sample
from foretoken.engine.default_speculation import DEMO_DRAFT
from foretoken.engine.errors import ConfigError


def test_conversations_and_plain_text_are_told_apart() -> None:
    read = read_conversation("user: Hi\nassistant: Hello: you\n\nlist: 1\nuser: Bye")
    assert read == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello: you\n\nlist: 1"},
        {"role": "user", "content": "Bye"},
    ]
    assert read_conversation("# A title\nuser: this is no conversation") is None
    assert read_conversation("") is None


def test_the_sample_holds_the_whole_text_once() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_DRAFT)
    text = "user: One?\nassistant: Two.\nuser: Three?\n---\nPlain text goes on and on. " + "It has more words. " * 20
    sample = read_sample(tokenizer, text, 16, num_prompts=10, prompt_tokens=8)
    assert all(1 < len(window) <= 16 for window in sample.windows)
    whole = tokenizer.decode([token for window in sample.windows for token in window])
    assert whole.startswith("<|im_start|>user\nOne?<|im_end|>") and whole.count("Three?") == 1 and "more words. It has" in whole
    assert [len(prompt) for prompt in sample.prompts] == [8, 8, 8]
    assert tokenizer.decode(sample.prompts[0]).endswith("?<|im_end|>\n<|im_start|>assistant\n")
    for nothing in ("", "short"):
        with pytest.raises(ConfigError, match="too short"):
            read_sample(tokenizer, nothing, 16, num_prompts=10, prompt_tokens=8)


def test_the_own_text_has_conversations_and_passages_enough() -> None:
    sample = read_sample(AutoTokenizer.from_pretrained(DEMO_DRAFT), HELD_OUT.read_text(), 1024, num_prompts=1000, prompt_tokens=1024)
    assert sum(map(len, sample.windows)) > 2000 and len(sample.prompts) > 30
