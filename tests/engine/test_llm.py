"""LLM end to end with tiny random checkpoints: shapes of input, exactness with and without drafts, and what is left behind."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from native_only import native_only
from quantised_checkpoints import quantise
from safetensors.torch import save_file
from tiny_models import save_llama
from tqdm import tqdm

from foretoken import LLM, GrammarSpec, SamplingParams
from foretoken.engine.errors import ContextTooLong, EngineDead, InvalidRequest
from foretoken.engine.outputs import RequestOutput

PROMPTS = ["The quick brown fox", "def add(a, b):", "one two one two one two one", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_gb": 0.005, "max_num_seqs": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def drafting(tiny_target: Path) -> Iterator[LLM]:
    """The target drafts for itself: nearly every draft is accepted."""
    draft = {"method": "draft_model", "model": str(tiny_target), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(tiny_target, speculative_config=draft, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> Iterator[LLM]:
    with LLM(model=str(tiny_target), speculative_config={"method": "off"}, **OPTIONS) as llm:
        yield llm


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def generate(llm: LLM, prompts: Any, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def chat(llm: LLM, messages: Any, **settings: Any) -> list[RequestOutput]:
    return llm.chat(messages, GREEDY, use_tqdm=False, **settings)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(seed=11, max_tokens=16, n=2, ignore_eos=True), SamplingParams(seed=5, top_k=5, presence_penalty=1.0)],
    ids=["greedy", "seeded", "penalties"],
)
def test_speculation_changes_speed_only(drafting: LLM, plain: LLM, params: SamplingParams) -> None:
    with_drafts, without = generate(drafting, PROMPTS, params), generate(plain, PROMPTS, params)
    assert tokens(with_drafts) == tokens(without)
    assert [c.text for o in with_drafts for c in o.outputs] == [c.text for o in without for c in o.outputs]
    for output in without:
        assert output.metrics.speculative_decoding.num_draft_tokens == 0


@pytest.mark.parametrize("executor", ["auto", "torch", "transformers"])
def test_the_default_dtype_of_the_process_changes_nothing(
    tiny_target: Path, tiny_draft: Path, executor: str, other_default: torch.dtype
) -> None:
    config = {"method": "draft_model", "model": str(tiny_draft), "adaptive": False, "draft_sample_method": "probabilistic"}
    edited: dict[str, Any] = {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.1, "logprobs": 1}
    each = [GREEDY, SamplingParams(max_tokens=16, ignore_eos=True, top_p=0.9, min_p=0.01, **edited)]
    for rule in ("match", "block"):
        said = []
        for dtype in (other_default, torch.float32):
            torch.set_default_dtype(dtype)
            with LLM(tiny_target, config | {"rejection_sample_method": rule}, executor=executor, **OPTIONS) as llm:
                outputs = generate(llm, PROMPTS[:2], each)
                drafted = [(p.num_draft_tokens, p.num_accepted_tokens, p.num_failures) for p in llm.stats().proposers]
                said.append((tokens(outputs), drafted))
        assert said[0] == said[1] and said[0][1][1][0] > 0


def test_acceptance_of_each_request(drafting: LLM) -> None:
    before = drafting.stats()
    outputs = generate(drafting, PROMPTS)
    for output in outputs:
        said = output.metrics.speculative_decoding
        assert said.num_spec_tokens == 3 and said.num_draft_tokens > 0
        assert sum(said.acceptance_histogram) == said.num_spec_steps
        assert sum(n * steps for n, steps in enumerate(said.acceptance_histogram)) == said.num_accepted_draft_tokens
        assert said.draft_acceptance_rate == said.num_accepted_draft_tokens / said.num_draft_tokens > 0.5
        assert said.mean_acceptance_length == 1 + said.num_accepted_draft_tokens / said.num_spec_steps > 2
    after = drafting.stats()
    assert after.num_draft_tokens - before.num_draft_tokens == sum(o.metrics.speculative_decoding.num_draft_tokens for o in outputs)
    assert after.generation_tokens - before.generation_tokens == 16 * len(PROMPTS)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"method": "off"}, 0),
        ({"method": "suffix"}, 24),
        ({"method": "ngram", "num_speculative_tokens": 3, "num_branches": 4}, 12),
        ([{"method": "ngram", "num_speculative_tokens": 5}, {"method": "suffix", "suffix_decoding_max_tree_depth": 9}], 9),
    ],
)
def test_the_most_that_a_step_guesses_is_told_where_nobody_gave_a_number(tiny_target: Path, config: Any, most: int) -> None:
    with LLM(tiny_target, config, **OPTIONS) as llm:
        (output,) = generate(llm, "one two one two")
        said = output.metrics.speculative_decoding
        assert said.num_spec_tokens == most >= len(said.acceptance_histogram) - 1


def test_one_request_without_speculation(drafting: LLM) -> None:
    off = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, speculation={"method": "off"})
    spared, drafted = generate(drafting, ["one", "one"], [off, GREEDY])
    assert spared.metrics.speculative_decoding.num_draft_tokens == 0 < drafted.metrics.speculative_decoding.num_draft_tokens
    assert spared.outputs[0].token_ids == drafted.outputs[0].token_ids


def test_every_shape_of_prompt_is_the_same_prompt(plain: LLM) -> None:
    ids = plain.get_tokenizer().encode(PROMPTS[0])
    prompts: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, ids]
    outputs = generate(plain, prompts)
    assert all(output.prompt_token_ids == ids for output in outputs) and len({tuple(t) for t in tokens(outputs)}) == 1
    assert [output.prompt for output in outputs] == [PROMPTS[0], PROMPTS[0], None, None]
    assert len({output.request_id for output in outputs}) == 4
    assert generate(plain, []) == []


def test_text_logprobs_and_times(plain: LLM) -> None:
    (output,) = generate(plain, "The", SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True))
    (choice,) = output.outputs
    assert output.finished and choice.finished and (choice.finish_reason, choice.stop_reason) == ("length", None)
    assert choice.text == plain.get_tokenizer().decode(choice.token_ids, skip_special_tokens=True)
    assert choice.logprobs is not None and len(choice.logprobs) == 8
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry[token].rank == 1 and len(entry) == 3  # greedy: the chosen token is among the best
        assert [e.rank for e in entry.values()] == [1, 2, 3] and entry[token].decoded_token == plain.get_tokenizer().decode([token])
    everything = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=100)
    (whole,) = generate(plain, "The quick", everything)
    assert whole.prompt_logprobs is not None and whole.prompt_logprobs[1] is not None and len(whole.prompt_logprobs[1]) in (100, 101)
    assert whole.outputs[0].logprobs is not None and len(whole.outputs[0].logprobs[0]) == plain._running().model.vocab_size
    assert choice.cumulative_logprob == pytest.approx(sum(e[t].logprob for e, t in zip(choice.logprobs, choice.token_ids, strict=True)))
    worst = min(whole.outputs[0].logprobs[0].items(), key=lambda entry: entry[1].logprob)[0]
    named = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=[worst, choice.token_ids[0]])
    told = generate(plain, "The", named)[0].outputs[0].logprobs
    assert told is not None and {token: entry.rank for token, entry in told[0].items()} == {choice.token_ids[0]: 1, worst: None}
    times = output.metrics
    assert times.first_token_time is not None and times.last_token_time is not None
    assert times.arrival_time <= times.first_token_time <= times.last_token_time and times.num_generation_tokens == 8


def test_stop_string_ends_text_and_tokens(plain: LLM) -> None:
    (whole,) = generate(plain, "The", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    text = whole.outputs[0].text
    stop = next(char for char in text[5:] if char != "\ufffd" and char not in text[:5])
    (cut,) = generate(plain, "The", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop))
    choice = cut.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert choice.token_ids == whole.outputs[0].token_ids[: len(choice.token_ids)] and len(choice.token_ids) < 40


def test_choices_differ_and_share_the_prompt(plain: LLM) -> None:
    (output,) = generate(plain, ["a long enough prompt to fill some blocks of cache"], SamplingParams(n=3, max_tokens=12))
    assert [choice.index for choice in output.outputs] == [0, 1, 2] and len({c.text for c in output.outputs}) == 3
    (output,) = generate(plain, ["pass@k"], SamplingParams(n=200, max_tokens=8))
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 150


def test_a_seed_of_the_engine_repeats_the_run(tiny_target: Path) -> None:
    def said(seed: int) -> list[list[int]]:
        with LLM(tiny_target, {"method": "off"}, seed=seed, **OPTIONS) as llm:
            return tokens(llm.generate(["x", "x"], use_tqdm=False))

    first = said(42)
    assert first == said(42) != said(7) and first[0] != first[1]


def test_parameters_one_or_one_each(plain: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    assert [len(t) for t in tokens(plain.generate(PROMPTS[:2], each, use_tqdm=False, priority=[1, 0]))] == [2, 5]
    assert len(tokens(plain.generate("x", use_tqdm=False))[0]) <= 16
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        plain.generate(["x"], each, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params is SamplingParams"):
        plain.generate("x", {"max_tokens": 5}, use_tqdm=False)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="sampling_params is SamplingParams, one for all prompts or one for each, not None"):
        plain.generate(["x", "y"], [GREEDY, None], use_tqdm=False)  # pyright: ignore[reportArgumentType]


def test_one_bad_prompt_refuses_the_call_before_it_runs(plain: LLM) -> None:
    before = plain.stats().num_steps
    assert plain.llm_engine.model_config.max_model_len == 512
    with pytest.raises(ContextTooLong, match=r"^prompts\[1\]: the prompt is too long: 600"):
        generate(plain, ["fine", [1] * 600])
    with pytest.raises(InvalidRequest, match=r"^the prompt is empty"):
        generate(plain, "")
    with pytest.raises(TypeError, match=r"^conversations\[1\]: message 0 is str"):
        plain.chat([[{"role": "user", "content": "hi"}], ["hi"]], GREEDY, use_tqdm=False)  # pyright: ignore[reportArgumentType]
    assert plain.stats().num_steps == before and plain.stats().num_waiting == 0


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """As a program at a terminal does: those in the background of a shell are started deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_waits_for_the_step_to_end(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a step would leave blocks that nobody owns, a whole one leaves nothing behind."""
    core = plain._running().core
    step, whole = core.step, list[int]()

    def interrupted(now: float) -> Any:
        if core.stats().num_running:
            os.kill(os.getpid(), signal.SIGINT)
        deltas = step(now)
        whole.append(len(deltas))
        return deltas

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(core, "step", interrupted)
        generate(plain, PROMPTS)
    assert len(whole) == 2, "the second step was interrupted, and ended all the same"
    assert not core.has_work
    core.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(tokens(generate(plain, PROMPTS))) == 4


def test_an_alarm_ends_the_call_and_fails_no_request(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's time limit: what its handler raises is no failure of the target or of a text."""
    committer = plain._running().core.committer
    write = committer._write

    def late(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGALRM)
        return write(*args)

    def end(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    with monkeypatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(committer, "_write", late)
        generate(plain, PROMPTS)
    assert signal.signal(signal.SIGALRM, before) is end
    plain._running().core.check()


def test_the_number_of_torchs_threads_is_left_alone(tiny_target: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    with LLM(tiny_target, **OPTIONS) as llm:
        for act in (lambda: generate(llm, "x"), lambda: llm.embed("x", use_tqdm=False)):
            assert torch.get_num_threads() == 3 and act()
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == 3


def test_threads_take_turns(plain: LLM) -> None:
    expected = {prompt: tokens(generate(plain, prompt)) for prompt in PROMPTS}
    with ThreadPoolExecutor(4) as pool:
        asked = [(prompt, pool.submit(plain.generate, prompt, GREEDY, use_tqdm=False)) for prompt in PROMPTS * 5]
    assert all(tokens(answer.result()) == expected[prompt] for prompt, answer in asked)
    plain._running().core.check()


def test_tools_reach_templates_that_know_of_them(plain: LLM) -> None:
    contents = "{% for m in messages %}{{ m.content }}{% endfor %}"
    listed = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + contents
    of_system = "{% for m in messages %}<{{ m.role }}>{{ m.get('tools') }}{{ m.content }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    for template, tools, text in (
        (listed, [tool], "[weather]be briefhi"),
        (listed, None, "be briefhi"),
        (of_system, [tool], f"<system>[{json.dumps(tool['function'])}]be brief<user>Nonehi"),
    ):
        (output,) = chat(plain, messages, chat_template=template, tools=tools)
        assert output.prompt == text
    with pytest.raises(InvalidRequest, match="does not know of tools"):
        chat(plain, messages, chat_template=contents, tools=[tool])


def test_an_output_of_a_given_form(plain: LLM) -> None:
    settings = SamplingParams(temperature=0, max_tokens=16, grammar=GrammarSpec.choice(["yes", "no"]))
    assert {output.outputs[0].text for output in generate(plain, PROMPTS, settings)} <= {"yes", "no"}


def test_chat_is_generate_behind_the_template(plain: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = "<|user|>hi<|end|><|assistant|>"
    ids = plain.get_tokenizer().encode(text, add_special_tokens=False)
    (expected,) = generate(plain, [ids])
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for outputs in (chat(plain, messages), chat(plain, [messages, parts])):
        for output in outputs:
            assert (output.prompt, output.prompt_token_ids) == (text, ids)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    (bare,) = chat(plain, messages, add_generation_prompt=False)
    assert bare.prompt == "<|user|>hi<|end|>"
    with pytest.raises(InvalidRequest, match="template"):
        chat(plain, messages, chat_template="{% for %}")
    of_parts = "{% for m in messages %}<|user|>{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
    (output,) = chat(plain, messages, chat_template=of_parts)
    assert output.prompt == text


def test_a_conversation_that_a_template_refuses_is_told_in_another_way(plain: LLM) -> None:
    """As by the server: Llama's take one call in a message, Mistral's and Gemma's users and answers by turns."""
    one_call = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments.a }}]{% endfor %}"
        "{{ m.name }};{% endfor %}"
    )
    calls = [{"id": id, "type": "function", "function": {"name": f"f{id}", "arguments": '{"a": 7}'}} for id in "12"]
    user = {"role": "user", "content": "hi"}
    called = [user, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "tool_call_id": "1", "content": "r"}]
    (output,) = chat(plain, called, chat_template=one_call)
    assert output.prompt == "u:hi;a:[f17];t:rf1;a:[f27];"
    odd = "{% if (m.role == 'user') == loop.index0 % 2 %}{{ raise_exception('by turns') }}{% endif %}"
    by_turns = "{% for m in messages %}" + odd + "{{ m.content }}|{% endfor %}"
    (output,) = chat(plain, [user, user], chat_template=by_turns)
    assert output.prompt == "hi\n\nhi|"
    with pytest.raises(InvalidRequest, match="refuses this conversation: never"):
        chat(plain, [user], chat_template="{{ raise_exception('never') }}")
    with pytest.raises(InvalidRequest, match="needs a role"):
        chat(plain, [user, {"content": "hi"}])


def test_the_bar_shows_speed_and_acceptance(drafting: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    drafting.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "4/4" in shown and "tokens/s" in shown and "% of drafts accepted" in shown
    generate(drafting, PROMPTS[:1])
    assert capsys.readouterr().err == ""
    for act in (lambda bar: drafting.generate(PROMPTS, GREEDY, use_tqdm=bar), lambda bar: drafting.embed(PROMPTS, use_tqdm=bar)):
        act(partial(tqdm, bar_format="{n} of {total}"))
        assert "4 of 4" in capsys.readouterr().err


def test_shut_down_says_so(tiny_target: Path) -> None:
    with LLM(tiny_target, **OPTIONS) as llm:
        assert tokens(generate(llm, "x"))
    with pytest.raises(EngineDead):
        llm.generate("x")


def test_answers_are_kept_from_one_process_to_the_next(tiny_target: Path, tmp_path: Path) -> None:
    settings = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation={"corpus_id": "mine"})
    drafts: list[int] = []
    answers: list[list[list[int]]] = []
    for _ in range(2):
        options = OPTIONS | {"speculation_corpus_dir": tmp_path / "corpora"}
        with LLM(tiny_target, speculative_config={"method": "suffix", "adaptive": False}, **options) as llm:
            for _ in range(2):
                (output,) = generate(llm, "x", settings)
                answers.append(tokens([output]))
                drafts.append(output.metrics.speculative_decoding.num_accepted_draft_tokens)
    assert all(answer == answers[0] for answer in answers)
    assert drafts[0] < drafts[2] and min(drafts[1], drafts[3]) > 12


@native_only
def test_a_quantised_model_with_a_quantised_draft(tmp_path: Path) -> None:
    """Weights become about as narrow as they are stored, of the same numbers as those of its twin in plain."""
    twin = save_llama(tmp_path / "twin", hidden_size=64, num_layers=2, seed=0)
    folder = Path(shutil.copytree(twin, tmp_path / "quantised"))
    save_file(dict(quantise(folder, "gptq")), twin / "model.safetensors", {"format": "pt"})
    options: dict[str, Any] = {**OPTIONS, "dtype": "bfloat16"}
    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(folder, speculative_config=draft, **options) as llm:
        said = tokens(generate(llm, PROMPTS))
        lines = "\n".join(llm._running().banner)
        assert lines.count("int4 weights (stored as gptq), bfloat16") == 2, lines
    with LLM(folder, speculative_config={"method": "off"}, **options) as llm:
        assert tokens(generate(llm, PROMPTS)) == said
    alike = []
    for model in (folder, twin):  # the head is narrow too where a format is asked for
        with LLM(model, speculative_config={"method": "off"}, quantization="int4", **options) as llm:
            alike.append(tokens(generate(llm, PROMPTS)))
    assert alike[0] == alike[1]
