"""Streamed text against the tokenizer's own decoding of the whole output, over hostile bytes and stop strings."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.request import SamplingParams

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café 東京 すし 👩‍👩‍👧 e\u0301e\u0301 🏳️‍🌈",
    "STOP stopping stops </s> \n\n",
] * 3
TEXTS = st.lists(
    st.sampled_from(["the quick", " fox", "é", "e\u0301", "東京", "👩‍👩‍👧", "😀", "\ufffd", "\n", " ", "STOP", "ST", "x"])
).map("".join)


def make_byte_level() -> PreTrainedTokenizerFast:
    bpe = byte_level(CORPUS, 340, ["<|end|>"])
    bpe.add_tokens([AddedToken("<tool call>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


def make_sentencepiece() -> PreTrainedTokenizerFast:
    """Llama 2's scheme: spaces as ▁, bytes as <0x..>, one leading space dropped."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "hello", "ing", "!", "é", "a"]
    vocab = {name: index for index, name in enumerate(names)}
    bpe = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTE_LEVEL, SENTENCEPIECE = make_byte_level(), make_sentencepiece()
NUM_TOKENS = len(BYTE_LEVEL)
PROMPT = BYTE_LEVEL.encode("the")
BYTE_TOKENS = [BYTE_LEVEL.get_vocab()[bytes_to_unicode()[byte]] for byte in range(256)]
SP = SENTENCEPIECE.get_vocab()


def one_token_a_byte(raw: bytes) -> list[int]:
    return [BYTE_TOKENS[byte] for byte in raw]


def decode(tokenizer: PreTrainedTokenizerFast, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def params(**settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=None, **settings)  # pyright: ignore[reportArgumentType]


def stream(tokenizer: PreTrainedTokenizerFast, token_ids: list[int], prompt: list[int] = PROMPT, **settings: object) -> list[str]:
    """What each token adds, and what the end adds."""
    text = Detokenizer(tokenizer, prompt, params(**settings))
    return [text.push([token]).text for token in token_ids] + [text.finish()]


def offline_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop that is complete first; the longest of several that end together."""
    for end in range(1, len(text) + 1):
        if ended := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, NUM_TOKENS + 3), max_size=60), st.booleans())
def test_any_tokens_decode_as_the_tokenizer_does(token_ids: list[int], skip: bool) -> None:
    """Invalid bytes, special tokens, and ids that the tokenizer lacks included: byte-level decoding is exact throughout."""
    assert "".join(stream(BYTE_LEVEL, token_ids, skip_special_tokens=skip)) == decode(BYTE_LEVEL, token_ids, skip)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_nothing_sent_is_ever_half_a_character(text: str) -> None:
    pieces = stream(BYTE_LEVEL, one_token_a_byte(text.encode()))
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces) and not pieces[-1]


def test_invalid_bytes_are_not_withheld() -> None:
    assert stream(BYTE_LEVEL, one_token_a_byte(b"\x80" * 6)) == ["\ufffd"] * 6 + [""]


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    assert stream(BYTE_LEVEL, one_token_a_byte("😀".encode()[:3])) == ["", "", "", "\ufffd"]


# Few letters, one token each, and stops of the same letters: nearly every output has stops across tokens and near misses.
LETTERS = st.sampled_from(one_token_a_byte(b"STO") + BYTE_LEVEL.encode("TO") + one_token_a_byte("é".encode()))
ANY_TOKENS = st.one_of(st.integers(0, NUM_TOKENS - 1), st.sampled_from(BYTE_LEVEL.encode("STOP stop the fox 東京")))


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.lists(LETTERS, max_size=40), st.lists(ANY_TOKENS, max_size=40)),
    st.lists(st.one_of(st.text("STOé", min_size=2, max_size=6), TEXTS.filter(lambda s: 0 < len(s) < 20)), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_stops_cut_as_offline_whatever_the_split(token_ids: list[int], stops: list[str], include: bool, data: st.DataObject) -> None:
    expected, stop = offline_cut(decode(BYTE_LEVEL, token_ids), stops, include)
    text = Detokenizer(BYTE_LEVEL, PROMPT, params(stop=stops, include_stop_str_in_output=include))
    sent, start, kept = "", 0, len(token_ids)
    while start < len(token_ids):
        width = data.draw(st.integers(1, 6))
        pushed = text.push(token_ids[start : start + width])
        sent += pushed.text
        assert expected.startswith(sent), "text was sent that the output does not have"
        if pushed.num_kept is not None:
            assert pushed.stop_reason == stop
            kept = start + pushed.num_kept
            break
        start += width
    assert sent + text.finish() == expected
    if kept < len(token_ids):  # the last kept token is the one that completes the stop
        assert offline_cut(_certain(token_ids[:kept]), stops, include) == (expected, stop)
        assert offline_cut(_certain(token_ids[: kept - 1]), stops, include)[1] is None


def _certain(token_ids: list[int]) -> str:
    """The text without an unfinished last character."""
    text = Detokenizer(BYTE_LEVEL, PROMPT, params())
    return text.push(token_ids).text


def test_no_more_is_held_back_than_may_begin_a_stop() -> None:
    text = Detokenizer(BYTE_LEVEL, PROMPT, params(stop="abcd"))
    assert [text.push(one_token_a_byte(new)).text for new in (b"xyab", b"q", b"aba", b"b")] == ["xy", "abq", "ab", ""]
    assert text.finish() == "ab"


def test_stop_inside_one_push() -> None:
    tokens = BYTE_LEVEL.encode("the fox") + BYTE_LEVEL.encode("\n\n") + BYTE_LEVEL.encode("stops")
    before = len(BYTE_LEVEL.encode("the fox"))
    pushed = Detokenizer(BYTE_LEVEL, PROMPT, params(stop="\n\n")).push(tokens)
    assert (pushed.text, pushed.num_kept, pushed.stop_reason) == ("the fox", before + len(BYTE_LEVEL.encode("\n\n")), "\n\n")


def test_first_complete_stop_wins_then_the_longest() -> None:
    tokens = BYTE_LEVEL.encode("xabcd")
    assert Detokenizer(BYTE_LEVEL, PROMPT, params(stop=["abcd", "b"])).push(tokens).stop_reason == "b"
    assert Detokenizer(BYTE_LEVEL, PROMPT, params(stop=["c", "abc"])).push(tokens).stop_reason == "abc"


def test_min_tokens_are_not_searched() -> None:
    tokens = one_token_a_byte(b"abab")
    pushed = Detokenizer(BYTE_LEVEL, PROMPT, params(stop="ab", min_tokens=2)).push(tokens)
    assert (pushed.text, pushed.num_kept) == ("ab", 4)
    pushed = Detokenizer(BYTE_LEVEL, PROMPT, params(stop="ab", min_tokens=1)).push(tokens)
    assert (pushed.text, pushed.num_kept) == ("ab", 4)


def test_sentencepiece_keeps_the_space_behind_a_prompt() -> None:
    output = [SP["▁world"], SP["▁world"]]
    assert "".join(stream(SENTENCEPIECE, output, prompt=[SP["<s>"], SP["▁hello"]])) == " world world"
    assert "".join(stream(SENTENCEPIECE, output, prompt=[SP["<s>"]])) == "world world" == decode(SENTENCEPIECE, output)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁hello", "hello", "ing", "!", "é", "</s>", "😀", "ü"]), max_size=30))
def test_sentencepiece_continues_the_prompt(names: list[str]) -> None:
    token_ids: list[int] = []
    for name in names:
        token_ids.extend([SP[name]] if name in SP else [SP[f"<0x{byte:02X}>"] for byte in name.encode()])
    prompt = [SP["<s>"], SP["a"]]
    whole = decode(SENTENCEPIECE, prompt + token_ids)
    assert "".join(stream(SENTENCEPIECE, token_ids, prompt=prompt)) == whole.removeprefix("a")
