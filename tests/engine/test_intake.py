"""Every bound of a request, at and around its edge; and what a good request becomes."""

import re
from typing import Any

import pytest
from tiny_models import save_tokenizer
from transformers import PreTrainedTokenizerFast

from foretoken.engine.errors import ContextTooLong, InvalidRequest
from foretoken.engine.intake import Intake
from foretoken.engine.origin import Origin
from foretoken.engine.request import SamplingParams

VOCAB, CONTEXT = 320, 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))  # 300 tokens


@pytest.fixture
def intake(tokenizer: PreTrainedTokenizerFast) -> Intake:
    return make_intake(tokenizer)


def make_intake(tokenizer: PreTrainedTokenizerFast, cache_tokens: int = 1000, context: int = CONTEXT) -> Intake:
    return Intake(tokenizer, VOCAB, len(tokenizer), context, cache_tokens, [0], ["ngram", "draft_model", "ngram"])


def refused(intake: Intake, prompt: list[int], **settings: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        intake.requests("r", prompt, SamplingParams(**settings), 0.0)  # pyright: ignore[reportArgumentType]
    return caught.value


def test_choices_share_a_seed_and_differ_by_index(intake: Intake) -> None:
    children = intake.requests("r", [5, 6], SamplingParams(n=3), now=2.5, origin=Origin(-1, "s"))
    assert [(c.request_id, c.choice) for c in children] == [("r-0", 0), ("r-1", 1), ("r-2", 2)]
    assert len({c.seed for c in children}) == 1
    assert all((c.arrival_time, c.priority, c.cache_salt, c.token_ids, c.max_tokens) == (2.5, -1, "s", [5, 6], 16) for c in children)
    assert children[0].token_ids is not children[1].token_ids and children[0].eos_token_ids == {0}


def test_seeds_are_random_unless_given(intake: Intake) -> None:
    seeds = {intake.requests("r", [1], SamplingParams(), 0.0)[0].seed for _ in range(8)}
    assert len(seeds) == 8
    assert intake.requests("r", [1], SamplingParams(seed=-7), 0.0)[0].seed == -7
    assert intake.requests("r", [1], SamplingParams(), 0.0)[0].request_id == "r"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"), [(63, 1, True), (64, 1, False), (60, 4, True), (60, 5, False), (48, 16, True)]
)
def test_context_is_exact(intake: Intake, num_prompt: int, max_tokens: int, fits: bool) -> None:
    prompt = [1] * num_prompt
    if fits:
        assert intake.requests("r", prompt, SamplingParams(max_tokens=max_tokens), 0.0)[0].max_tokens == max_tokens
    else:
        error = refused(intake, prompt, max_tokens=max_tokens)
        assert isinstance(error, ContextTooLong) and error.code == "context_length_exceeded"
        assert str(num_prompt) in str(error) and "64" in str(error)


def test_agents_know_a_full_context_by_its_words(tokenizer: PreTrainedTokenizerFast) -> None:
    """They shorten the conversation then, by as much as the numbers say, which they read without separators."""
    intake = make_intake(tokenizer, cache_tokens=4096, context=2048)
    window, anthropics = r"This model's maximum context length is (\d+) tokens", r"prompt is too long\D*(\d+) tokens > (\d+) maximum"
    without_room = str(refused(intake, [1] * 3000))
    assert [re.findall(pattern, without_room) for pattern in (window, anthropics)] == [["2048"], [("3000", "2047")]]
    asks_much = str(refused(intake, [1] * 2000, max_tokens=1000))
    assert re.findall(window + r".*requested (\d+) tokens.*at most (\d+)$", asks_much) == [("2048", "3000", "48")]
    with pytest.raises(ContextTooLong) as caught:
        intake.check_text("input", [1] * 3000)
    assert re.findall(window, str(caught.value)) == ["2048"]
    with pytest.raises(ContextTooLong, match=window):
        intake.encode("x" * 1_000_000)


def test_no_max_tokens_means_what_the_context_or_the_cache_leaves(tokenizer: PreTrainedTokenizerFast, intake: Intake) -> None:
    assert intake.requests("r", [1] * 10, SamplingParams(max_tokens=None), 0.0)[0].max_tokens == CONTEXT - 10
    small = make_intake(tokenizer, cache_tokens=32)
    assert small.requests("r", [1] * 10, SamplingParams(max_tokens=None), 0.0)[0].max_tokens == 22
    assert "KV cache" in str(refused(small, [1] * 32))


def test_both_numbers_and_the_limit_are_named(intake: Intake) -> None:
    message = str(refused(intake, [1] * 50, max_tokens=20))
    assert all(number in message for number in ("50", "20", "70", "64", "14"))


@pytest.mark.parametrize(
    ("prompt", "settings", "param"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([True], {}, "prompt"),
        ([0.0], {}, "prompt"),
        (["1"], {}, "prompt"),
        ([2**63], {}, "prompt"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [2**31]}, "allowed_token_ids"),
        ([1], {"allowed_token_ids": [310]}, "allowed_token_ids"),  # only padding of the vocabulary
        ([1], {"bad_words": [""]}, "bad_words"),
        ([1], {"bad_words": ["  "]}, "bad_words"),
        ([1], {"bad_words": ["x" * 257]}, "bad_words"),
        ([1], {"bad_words": ["x" * 250] * 66}, "bad_words"),
        ([1], {"bad_words": [["x"]]}, "bad_words"),
        ([1], {"allowed_token_ids": [1] * (VOCAB + 1)}, "allowed_token_ids"),
        ([1], {"prediction": [VOCAB]}, "prediction"),
        ([1], {"prediction": "x" * 10_000}, "prediction"),
        ([1], {"prediction": "\ud800"}, "prediction"),
        ([1], {"min_tokens": 64, "max_tokens": None}, "min_tokens"),
        ([1], {"stop": "x", "detokenize": False}, "stop"),
        ([1], {"speculation": {"method": "eagle"}}, "speculation.method"),
    ],
)
def test_refused_with_the_fields_name(intake: Intake, prompt: list[int], settings: dict[str, object], param: str) -> None:
    assert refused(intake, prompt, **settings).param == param


def test_edges_of_the_vocabulary_are_in(intake: Intake) -> None:
    settings = SamplingParams(logit_bias={0: 1.0, VOCAB - 1: -1.0}, allowed_token_ids=[0, 299], stop_token_ids=[VOCAB - 1])
    assert intake.requests("r", [0, VOCAB - 1], settings, 0.0)


@pytest.mark.parametrize("method", ["auto", "off", "ngram", "draft_model"])
def test_configured_methods_are_in(intake: Intake, method: str) -> None:
    assert intake.requests("r", [1], SamplingParams(speculation={"method": method}), 0.0)


def test_unknown_method_lists_the_known(intake: Intake) -> None:
    assert "'auto', 'off', 'ngram', 'draft_model'" in str(refused(intake, [1], speculation={"method": "medusa"}))


def test_bad_words_of_many_prompts_are_encoded_once(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    intake, texts = make_intake(tokenizer), list[str]()
    encode = intake.encode
    monkeypatch.setattr(intake, "encode", lambda text, *args, **settings: (texts.append(text), encode(text, *args, **settings))[1])
    params = SamplingParams(bad_words=["fox", "dog"])
    made = [intake.requests(f"r{number}", [1], params, 0.0)[0].bad_word_ids for number in range(3)]
    assert made[0] == made[1] == made[2] and len(texts) == 4


def test_bad_words_are_spelled_with_and_without_a_space(intake: Intake, tokenizer: PreTrainedTokenizerFast) -> None:
    request = intake.requests("r", [1], SamplingParams(bad_words=[" fox", "fox"]), 0.0)[0]
    assert sorted(tokenizer.decode(list(ids)) for ids in request.bad_word_ids) == [" fox", "fox"]


def test_prediction_text_becomes_plain_tokens(intake: Intake, tokenizer: PreTrainedTokenizerFast) -> None:
    request = intake.requests("r", [1], SamplingParams(prediction="return a + b"), 0.0)[0]
    assert tokenizer.decode(list(request.prediction)) == "return a + b"
    assert intake.requests("r", [1], SamplingParams(prediction=[4, 5]), 0.0)[0].prediction == (4, 5)


class Upper(PreTrainedTokenizerFast):
    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().encode(text.upper(), *args, **kwargs)


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Upper])
def test_texts_have_the_tokenizers_own_ids_however_others_use_it(
    tokenizer: PreTrainedTokenizerFast, kind: type[PreTrainedTokenizerFast]
) -> None:
    own = kind(tokenizer_object=tokenizer.backend_tokenizer)
    intake, backend = make_intake(own), own.backend_tokenizer
    for text in ("", "fox", " two  foxes\n", "<|user|>\u00fc \U0001f98a<|end|>", "x" * 200):
        for special in (False, True):
            expected = own.encode(text, add_special_tokens=special)
            assert intake.encode(text, special) == expected
            for leave in (
                lambda: backend.enable_truncation(1),
                lambda: backend.enable_padding(length=300),
                lambda: setattr(backend, "encode_special_tokens", True),
            ):
                leave()
                assert intake.encode(text, special) == expected


def test_text_too_long_is_refused_unread(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert intake.encode("a fox")
    monkeypatch.setattr(intake, "_tokenizer", None)
    with pytest.raises(ContextTooLong, match="1,000,000 bytes"):
        intake.encode("x" * 1_000_000)
    with pytest.raises(InvalidRequest, match="surrogate"):
        intake.encode("a\udfff")


def test_priority_must_be_a_bounded_integer(intake: Intake) -> None:
    for priority in (2**40, True, 1.5):
        with pytest.raises(InvalidRequest, match="priority"):
            intake.requests("r", [1], SamplingParams(), 0.0, Origin(priority))  # pyright: ignore[reportArgumentType]


def test_tenant_salt_and_corpus_keep_requests_apart(intake: Intake) -> None:
    def made(tenant: str, salt: str, name: str | None) -> tuple[str, str]:
        (request,) = intake.requests("r", [1], SamplingParams(speculation={"corpus_id": name}), 0.0, Origin(0, salt, tenant))
        return request.cache_salt, request.corpus_id

    assert made("", "", None) == ("", "anyone.default") == made("", "", "default")
    assert made("k1", "", "mine") == ("k1", "k1.mine")
    cache_salt, corpus_id = made("k1", "secret", "mine")
    assert cache_salt == "k1.secret" and corpus_id.startswith("k1.mine.") and "secret" not in corpus_id
    variants = [made(tenant, salt, name) for tenant in ("", "k1", "k2") for salt in ("", "s1", "s2") for name in (None, "a", "b")]
    assert len({corpus_id for _, corpus_id in variants}) == 27 and len({cache_salt for cache_salt, _ in variants}) == 9
