"""Structured output under speculation: every output that ends is valid, and is token for token what it is without guesses.

Hundreds of JSON schemas, with all kinds of drafts in batches of 16 on the embedded model: chains and trees, from texts and from
every drafter that the model brings, each cut by the grammar and headed by the tokens that it forces.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fixed_k import fixed
from json_schemas import json_schema
from jsonschema import Draft202012Validator

from foretoken import LLM, SamplingParams
from foretoken.engine.default_speculation import DEMO_DRAFT
from foretoken.engine.errors import InvalidRequest
from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.kernels import native

NUM_TOKENS = 160
OPTIONS: dict[str, Any] = {"kv_cache_gb": 0.25, "max_num_seqs": 16}
TEMPERATURES = {"greedy": 0.0, "seeded": 1.0}
PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "ngram_2": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_branches": 3},
    "suffix": {"method": "suffix"},
    "suffix_2": {"method": "suffix", "use_tree": True},
    "draft_model": {"model": str(DEMO_DRAFT), "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
    **{name: {"method": name} for name in ("ngram_cache", "pard", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash")},
}
DRAWN = {**PROPOSERS["draft_model"], "rejection_sample_method": "standard"}
PROMPTS = ["Describe a person as JSON.", 'Fill in: {"name": "Ann", "tags": ["red", "green"], "id": 5}', "one two one two one two", "JSON:"]
NETWORK: dict[str, Any] = {"executor": "native"} if native.availability().isa is not None else {"executor": "torch", "dtype": "float32"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(speculative_config=fixed(list(PROPOSERS.values())), **NETWORK, **OPTIONS) as made:
        yield made


def outputs(llm: LLM, schemas: list[dict[str, Any]], temperature: float, methods: list[str]) -> list[Any]:
    """Schema i under methods[i % len(methods)]."""
    tokenizer = llm.get_tokenizer()
    prompts = [{"prompt_token_ids": tokenizer.encode(PROMPTS[i % len(PROMPTS)])} for i in range(len(schemas))]
    params = [
        SamplingParams(
            temperature=temperature, seed=1000 + i, max_tokens=NUM_TOKENS, grammar=GrammarSpec.json_schema(schema),
            speculation={"method": methods[i % len(methods)]},
        )
        for i, schema in enumerate(schemas)
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def assert_valid(schemas: list[dict[str, Any]], answers: list[Any], at_least: float) -> None:
    """Every output that ended by itself is what its schema describes, and so many did."""
    num_ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        (choice,) = answer.outputs
        assert choice.finish_reason in ("stop", "length"), choice
        if choice.finish_reason == "stop":
            num_ended += 1
            checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            checker.validate(json.loads(choice.text))
    assert num_ended >= at_least * len(schemas), f"only {num_ended} of {len(schemas)} came to an end"


def assert_same(schemas: list[dict[str, Any]], plain: list[Any], guessed: list[Any]) -> None:
    for schema, expected, got in zip(schemas, plain, guessed, strict=True):
        assert got.outputs[0].token_ids == expected.outputs[0].token_ids, (schema, expected.outputs[0].text, got.outputs[0].text)
        assert got.outputs[0].text == expected.outputs[0].text


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_schemas_of_many_kinds(llm: LLM, temperature: float) -> None:
    schemas = [json_schema(seed) for seed in range(60)]
    plain = outputs(llm, schemas, temperature, ["off"])
    assert_valid(schemas, plain, at_least=0.5)
    before = llm.stats()
    guessed = outputs(llm, schemas, temperature, [*PROPOSERS])
    assert_same(schemas, plain, guessed)
    after = llm.stats()
    assert after.num_accepted_tokens - before.num_accepted_tokens > 100
    llm._running().core.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", PROPOSERS)
@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_300_schemas(llm: LLM, method: str, temperature: float) -> None:
    schemas = [json_schema(seed) for seed in range(300)]
    plain = outputs(llm, schemas, temperature, ["off"])
    guessed = outputs(llm, schemas, temperature, [method])
    assert_valid(schemas, guessed, at_least=0.5)
    assert_same(schemas, plain, guessed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [DRAWN, {**DRAWN, "rejection_sample_method": "block"}, {**PROPOSERS["ngram"], "rejection_sample_method": "standard"}],
    ids=["standard", "block", "one-hot"],
)
def test_rules_of_ratios_stay_inside_the_grammar(config: dict[str, Any]) -> None:
    """Guesses that were drawn and are illegal stay in the draft, where the rule refuses them."""
    schemas = [json_schema(seed) for seed in range(40)]
    with LLM(speculative_config=fixed(config), **NETWORK, **OPTIONS) as llm:
        assert_valid(schemas, outputs(llm, schemas, 1.0, ["auto"]), at_least=0.5)
        assert llm.stats().num_accepted_tokens > 100
        assert_same(schemas, outputs(llm, schemas, 0.0, ["off"]), outputs(llm, schemas, 0.0, ["auto"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {**PROPOSERS["ngram"], "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8]},
        {**PROPOSERS["ngram"], "acceptance_method": "typical"},
    ],
    ids=["synthetic", "typical"],
)
def test_lossy_rules_stay_inside_the_grammar(config: dict[str, Any]) -> None:
    schemas = [json_schema(seed) for seed in range(40)]
    with LLM(speculative_config=fixed(config), allow_synthetic_acceptance=True, **NETWORK, **OPTIONS) as llm:
        for temperature in TEMPERATURES.values():
            assert_valid(schemas, outputs(llm, schemas, temperature, ["auto"]), at_least=0.4)


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.0, "repetition_penalty": 1.2}, {"bad_words": ["name", "1"], "min_tokens": 20}, {"logprobs": 2, "n": 2},
        {"ignore_eos": True}, {"top_p": 0.8, "logit_bias": {300: 5.0, 4: -100.0}}, {"stop": ["e"]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_grammar_beside_other_parameters(llm: LLM, settings: dict[str, Any], temperature: float) -> None:
    schemas = [json_schema(seed) for seed in (0, 1, 2, 4, 9, 10)]
    answers: list[list[list[int]]] = []
    for method in ("off", "ngram", "draft_model", "suffix_2"):
        shared = {"temperature": temperature, "seed": 5, "max_tokens": 40, "speculation": {"method": method}, **settings}
        params = [SamplingParams(**shared, grammar=GrammarSpec.json_schema(schema)) for schema in schemas]
        said = llm.generate(PROMPTS[1:2] * len(schemas), params, use_tqdm=False)
        answers.append([choice.token_ids for answer in said for choice in answer.outputs])
    assert all(answer == answers[0] for answer in answers[1:])
    assert len(answers[0]) == len(schemas) * settings.get("n", 1)


def test_forced_tokens_save_steps(llm: LLM) -> None:
    """A constant needs hardly more target passes than drafts: no proposer could have guessed it."""
    words = "Colourless green ideas sleep furiously, said nobody who was asked."
    steps: dict[str, int] = {}
    for method in ("off", "ngram"):
        before = llm.stats().num_steps
        params = SamplingParams(temperature=0, max_tokens=60, grammar=GrammarSpec.choice([words]), speculation={"method": method})
        (answer,) = llm.generate(["x"], params, use_tqdm=False)
        assert answer.outputs[0].text == words and answer.outputs[0].finish_reason == "stop"
        steps[method] = llm.stats().num_steps - before
    assert steps["off"] == len(answer.outputs[0].token_ids)
    assert steps["ngram"] <= 3


def test_what_cannot_be_enforced_is_refused_before_anything_runs(llm: LLM) -> None:
    for spec, says in [(GrammarSpec.regex("("), "regular expression"), (GrammarSpec.json_schema({"type": "x"}), "Invalid type")]:
        with pytest.raises(InvalidRequest, match=says):
            llm.generate(["x"], SamplingParams(grammar=spec))
    assert not llm._running().core.has_work


def test_a_grammar_that_breaks_on_the_way_costs_its_own_request_only(llm: LLM) -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(700)}
    too_wide = GrammarSpec.json_schema({"type": "object", "properties": properties, "additionalProperties": False})
    fine = GrammarSpec.json_schema({"const": [1, 2, 3]})
    for method in ("off", "ngram"):
        params = [SamplingParams(temperature=0, max_tokens=30, grammar=g, speculation={"method": method}) for g in (too_wide, fine)]
        broken, answered = llm.generate(["x", "x"], params, use_tqdm=False)
        assert broken.outputs[0].finish_reason == "error"
        assert answered.outputs[0].finish_reason == "stop" and json.loads(answered.outputs[0].text) == [1, 2, 3]
    llm._running().core.check()
