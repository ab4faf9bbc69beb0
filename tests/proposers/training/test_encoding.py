"""The tokenizer, the chat template, and chats as token ids with the assistant's part marked."""

import pytest
from transformers import PreTrainedTokenizerFast

from foretoken.proposers.training.corpus import Conversation, Record
from foretoken.proposers.training.encoding import encode, encode_prompt, prompts, texts_of
from foretoken.proposers.training.tokenizer import SPECIAL_TOKENS, TOOL_TOKENS, train_tokenizer

VOCAB = 400
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "assistant", "content": "Two."},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer((f"def add_{n}(value: int) -> int:\n    return value + {n}\n" for n in range(50)), VOCAB)


def test_vocabulary_and_markers(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= VOCAB
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert set(tokenizer.all_special_tokens) == set(SPECIAL_TOKENS)
    ids = tokenizer.convert_tokens_to_ids(list(TOOL_TOKENS))
    assert ids == list(range(len(tokenizer) - 4, len(tokenizer)))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(TOOL_TOKENS)
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("text", ["  two  spaces\n\n\ttab\r\n", "naïve 日本語 🙂 \x00\x7f", "x = 1234.5  # ok", " "])
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]


def test_chat_template_has_tools_and_calls(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template(CHAT[:-1], tools=[{"type": "function"}], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:\n<tools>\n"
        '{"type": "function"}\n</tools>\n'
        'To call one, answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n'
        "<|im_start|>user\n1?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_no_system_message_is_invented(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


def test_what_the_assistant_says_is_learned_and_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    chat, text = encode([Conversation(CHAT, 1), Record("", "plain", key=1)], tokenizer)
    learned = [token for token, learn in zip(chat.token_ids.tolist(), chat.learn, strict=True) if learn]
    assert tokenizer.decode(learned) == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>Two.<|im_end|>'
    assert text.learn.all() and tokenizer.decode(text.token_ids) == "plain<|endoftext|>"


def test_every_turn_of_the_assistant_gives_a_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = prompts(Conversation(CHAT, 1))
    assert first.reference == CHAT[2] and second.messages == CHAT[:4]
    text = str(tokenizer.decode(encode_prompt(second, tokenizer)))
    assert text.endswith("<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_a_tokenizer_learns_from_what_is_said_and_called() -> None:
    assert list(texts_of([Conversation(CHAT, 1), Record("", "plain", key=1)])) == [
        'Be brief.\n1?\n\n2\nTwo.\n{"name": "add", "arguments": {"a": 1}}', "plain"]
