"""The whole path that a GPU takes, run on a CPU: executors that start and finish, chains without a host, steps that overlap.

Everything but graphs and kernels is the same code, so outputs must be those of the plain torch executor.
"""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from as_on_a_gpu import bind_as_on_a_gpu, engines_elsewhere
from orthrus_targets import orthrus_of
from overlapping import runner_of
from random_adapters import pairs_for, save_adapter
from random_drafters import write
from recurrent_models import save_qwen3_5
from safetensors.torch import load_file, save_file
from saying import check_engine, said, token_ids
from variants import slow_but

from foretoken import LLM, LoRARequest, SamplingParams
from foretoken.engine.overlapped_runner import OverlappedRunner
from foretoken.engine.plan import StepPlan, Verdict
from foretoken.engine.runner import Forward
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.layout import ForwardOutput
from foretoken.proposers.drafting import Feed
from foretoken.proposers.early import Chain
from foretoken.proposers.learned import LearnedProposer

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21], [33] * 20, [7, 8, 7, 8, 7, 8, 7]]
OPTIONS: dict[str, Any] = {"executor": "torch", "dtype": "float32", "kv_cache_gb": 0.05, "max_model_len": 256, "max_num_seqs": 8}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "lookahead": {},
    "draft_model": {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
    "eagle": {"num_speculative_tokens": 3},
    "gumiho": {},
    "eagle3": {"num_speculative_tokens": 3},
    "medusa": {"num_speculative_tokens": 2},
    "hydra": {},
    "redrafter": {"num_speculative_tokens": 3},
    "dflash": {},
    "dflash2": {},
    "dflare": {},
    "ddtree": {"eagle_topk": 3, "num_draft_tokens": 6},
    "dspark": {},
    "orthrus": {},
    "uno": {"num_speculative_tokens": 3},
    "recurrent draft": {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
}
NAMED = {"gumiho": "eagle", **dict.fromkeys(("dflash2", "dflare", "ddtree"), "dflash"), "recurrent draft": "draft_model"}
"""A checkpoint of that method."""
NEVER_EARLY = METHODS.keys() - {"draft_model", "eagle", "eagle3"}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bind_as_on_a_gpu(monkeypatch)


def num_early(llm: LLM) -> int:
    """Chains of networks that were begun before anybody knew where they would start, and then asked for."""
    learned = [p for p in llm._running().core.proposers.proposers if isinstance(p, LearnedProposer)]
    return sum(proposer.early.num_used for proposer in learned if proposer.early is not None)


def say(llm: LLM, method: str, **params: Any) -> list[list[int]]:
    each = [
        SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": i, "speculation": {"method": method}, **params})
        for i in range(len(PROMPTS))
    ]
    return said(llm, PROMPTS, each)


def plainly(target: Path, monkeypatch: pytest.MonkeyPatch, *settings: dict[str, Any]) -> list[list[list[int]]]:
    """What is said under each of these settings where nobody guesses, on no GPU from now on."""
    monkeypatch.undo()
    with LLM(target, {"method": "off"}, **OPTIONS) as llm:
        return [say(llm, "off", **params) for params in settings]


def made(method: str, target: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The target, or one like it that brings its drafter along, and the configuration."""
    config = {"method": NAMED.get(method, method), "adaptive": False, **METHODS[method]}
    match method:
        case "ngram" | "lookahead":
            return target, config
        case "orthrus":
            return orthrus_of(target, folder / method), config
        case "recurrent draft":
            draft = save_qwen3_5(folder)
            for file in target.glob("*token*"):
                shutil.copy(file, draft / file.name)
            return target, config | {"model": str(draft)}
        case _:
            return target, config | {"model": str(write({"ddtree": "dflash"}.get(method, method), target, folder / method))}


@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_those_of_the_plain_executor(
    method: str, deep_target: Path, tmp_path: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep_target, config = made(method, deep_target, tmp_path)
    with LLM(deep_target, config, **OPTIONS) as llm:
        runner = runner_of(llm._running().core)
        name = NAMED.get(method, method)
        found = {name: say(llm, name, temperature=temperature) for name, temperature in (("off", 0), (name, 0))}
        drawn = say(llm, name, temperature=0.9, top_p=0.9)
        assert runner.num_used >= 10 and llm.stats().num_draft_tokens > 0 and runner.num_matched > 0
        assert num_early(llm) > 20 or method in NEVER_EARLY
        assert runner.num_used > 40 or method in NEVER_EARLY, "the target waited for the host to see the guesses"
        check_engine(llm)
    assert found["off"] == found[name]
    assert [found[name], drawn] == plainly(deep_target, monkeypatch, {"temperature": 0}, {"temperature": 0.9, "top_p": 0.9})


@pytest.mark.parametrize("match", ["earliest", "latest"])
def test_what_is_looked_up_needs_no_host(deep_target: Path, as_on_a_gpu: None, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once texts repeat themselves, guesses come from the device, and the host finds the same ones."""
    settings = {"max_tokens": 120, "temperature": 0, "logit_bias": {40: 20.0, 41: 20.0}}  # few texts of two tokens do not
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3, "match": match}
    with LLM(deep_target, {**config, "adaptive": False}, **OPTIONS) as llm:
        runner = runner_of(llm._running().core)
        found = say(llm, "ngram", **settings)
        stats = llm.stats()
        assert stats.num_accepted_tokens > 100 and runner.num_used > 0.5 * stats.num_steps
        check_engine(llm)
    assert [found] == plainly(deep_target, monkeypatch, settings)


def test_acceptance_by_decree_needs_no_host(deep_target: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic acceptance is walked on the device and says what the verifier says, and the next guesses are there at once."""
    config = {"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.7], "adaptive": False}
    options = {**OPTIONS, "allow_synthetic_acceptance": True}
    settings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}]
    with LLM(deep_target, config, **options) as llm:
        runner = runner_of(llm._running().core)
        found = [say(llm, "synthetic", max_tokens=60, **settings[0])]
        assert runner.num_used > 0.6 * llm.stats().num_steps and runner.num_matched > 0
        found.append(say(llm, "synthetic", max_tokens=60, **settings[1]))
    monkeypatch.undo()
    with LLM(deep_target, config, **options) as usual:
        assert found == [say(usual, "synthetic", max_tokens=60, **params) for params in settings]


@pytest.mark.parametrize("method", slow_but(["eagle3"], list(METHODS)))
def test_nothing_mixes_the_hosts_tensors_with_those_of_a_device(
    method: str, deep_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would, the step fails, and with it the request or the drafter."""
    deep_target, config = made(method, deep_target, tmp_path)
    settings: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.9, "logprobs": 2, "repetition_penalty": 1.2},
    ]
    with engines_elsewhere(monkeypatch) as device:
        llm = LLM(deep_target, config, **OPTIONS)
    with llm:
        found = [say(llm, NAMED.get(method, method), **params) for params in settings]
        assert llm.stats().num_draft_tokens > 0 and len(device.calls) > 10_000
        check_engine(llm)
    assert found == plainly(deep_target, monkeypatch, *settings)


@pytest.fixture(scope="module")
def alike(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is the target but for some noise: its guesses are right more often than not."""
    folder = tmp_path_factory.mktemp("alike")
    shutil.copytree(deep_target, folder, dirs_exist_ok=True)
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(file)
    noisy = {name: tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(noisy, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("blocks", [None, 9], ids=["room", "preemption"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_early_guesses_are_as_good_as_late_ones(
    deep_target: Path, alike: Path, as_on_a_gpu: None, adaptive: bool, blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"method": "draft_model", "model": str(alike), "num_speculative_tokens": 3, "adaptive": adaptive}
    config["draft_sample_method"] = "probabilistic"
    options = {**OPTIONS, "num_gpu_blocks_override": blocks} if blocks else OPTIONS
    said: list[list[list[int]]] = []
    accepted: list[float] = []
    for is_early in (True, False):
        with LLM(deep_target, config, **options) as llm:
            if not is_early:
                for proposer in llm._running().core.proposers.proposers:
                    if isinstance(proposer, LearnedProposer):
                        proposer.early = None
            said += [say(llm, "draft_model", temperature=temperature, max_tokens=40) for temperature in (0, 0.8)]
            stats = llm.stats()
            accepted.append(stats.num_accepted_tokens / max(stats.num_draft_tokens, 1))
            assert (num_early(llm) > 0) == is_early or adaptive  # which may find that guessing does not pay
            assert bool(stats.num_preemptions) == bool(blocks)
            llm._running().core.check()
    assert said[:2] == said[2:]
    if not adaptive:
        assert accepted[0] == pytest.approx(accepted[1], abs=0.03) and 0.3 < accepted[0] < 0.98


def test_a_step_that_is_computed_once_more_leaves_no_chain_behind(
    deep_target: Path, alike: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its verdict fails now and then: then nobody guesses in it, and its rows get other tokens than the chains were begun behind."""
    config: dict[str, Any] = {"method": "draft_model", "model": str(alike), "num_speculative_tokens": 3, "adaptive": False}
    calls = 0
    taken: list[tuple[list[int], list[int]]] = []
    with LLM(deep_target, config, **OPTIONS) as llm:
        core = llm._running().core
        (proposer,) = (p for p in core.proposers.proposers if isinstance(p, LearnedProposer))
        verify, early = core.verifier.verify, proposer.early
        assert early is not None
        take = early.take

        def failing(plan: StepPlan, output: ForwardOutput) -> Verdict:
            nonlocal calls
            calls += 1
            if calls % 4 == 0 and any(row.draft_token_ids for row in plan.rows):
                raise RuntimeError("a fault of the device")
            return verify(plan, output)

        def noted(feeds: Sequence[Feed]) -> list[Chain | None]:
            begun = early._begun
            chains = take(feeds)
            for feed, chain in zip(feeds, chains, strict=True):
                if chain is not None and begun is not None:
                    place, way = begun.rows[feed.row.request_id]
                    count, *said = begun.said.get()[place].tolist()
                    taken.append((list(feed.row.token_ids[way.length :]), said[:count]))
            return chains

        monkeypatch.setattr(core.verifier, "verify", failing)
        monkeypatch.setattr(early, "take", noted)
        found = say(llm, "draft_model", temperature=0)
        mixed = say(llm, "draft_model", temperature=0.8, logprobs=1)  # which the host decides from whole logits
        llm._running().core.check()
    assert len(taken) > 5 and all(known == said for known, said in taken)
    assert [found, mixed] == plainly(deep_target, monkeypatch, {"temperature": 0}, {"temperature": 0.8, "logprobs": 1})


def test_a_cache_that_runs_out_changes_nothing(deep_target: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places kept for the next step are few, and go when others need them."""
    with LLM(deep_target, {"method": "off"}, **{**OPTIONS, "num_gpu_blocks_override": 7}) as llm:
        found = say(llm, "off", temperature=0)
        assert llm.stats().num_preemptions > 0
        llm._running().core.check()
    assert [found] == plainly(deep_target, monkeypatch, {"temperature": 0})


def test_prompts_are_scored_beside_drafts_that_the_device_walks(
    deep_target: Path, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts come in chunks, so that others have begun to guess by then."""
    options = {**OPTIONS, "max_num_batched_tokens": 16}
    prompts = [[7, 8, 7, 8, 7, 8, 7], [*range(30, 60), *range(30, 60)]]
    params = [SamplingParams(temperature=0.9, seed=i, prompt_logprobs=i, max_tokens=12, ignore_eos=True) for i in range(2)]
    together = 0

    def counted(plan: StepPlan) -> Forward:
        nonlocal together
        assert isinstance(runner, OverlappedRunner)
        before = runner.num_matched
        forward = start(plan)
        together += bool(plan.scored) and runner.num_matched > before and any(row.draft_token_ids for row in plan.rows)
        assert not plan.scored or forward.answer is None, "scores would wait for chains that are begun"
        return forward

    def answers(llm: LLM) -> tuple[list[list[int]], list[float]]:
        found = llm.generate(prompts, params, use_tqdm=False)
        scores = [one.logprob for output in found for part in output.prompt_logprobs or [] if part for one in part.values()]
        return token_ids(found), scores

    with LLM(deep_target, {"method": "ngram", "adaptive": False, **METHODS["ngram"]}, **options) as llm:
        runner = llm._running().core.runner
        start = runner.start
        monkeypatch.setattr(runner, "start", counted)
        tokens, scores = answers(llm)
    assert together > 0, "the test shows nothing"
    monkeypatch.undo()
    with LLM(deep_target, {"method": "off"}, **options) as plain:
        expected, expected_scores = answers(plain)
    assert tokens == expected and scores and scores == pytest.approx(expected_scores, abs=1e-4)


def test_states_and_logits_may_stay_on_the_device(deep_target: Path, as_on_a_gpu: None) -> None:
    with LLM(deep_target, {"method": "off"}, **OPTIONS) as llm:
        executor = llm._running().model.executor
        assert isinstance(executor, GraphExecutor) and executor.captured.num_graphs == 0 and executor.device == torch.device("cpu")


@pytest.mark.parametrize("is_elsewhere", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "elsewhere"])
def test_rows_keep_their_adapters_where_steps_overlap(
    is_elsewhere: bool, deep_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a step that was begun behind one whose end nobody has seen."""
    names = ["one", None, "two", "one"]
    folders = {name: save_adapter(tmp_path / name, pairs_for(deep_target, seed, rank=2 + seed)) for seed, name in enumerate(("one", "two"))}
    requests = [None if name is None else LoRARequest(name, 1, str(folders[name])) for name in names]
    draft = {"method": "draft_model", "model": str(deep_target), "num_speculative_tokens": 3, "adaptive": False}
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def texts(llm: LLM) -> list[list[int]]:
        return said(llm, PROMPTS, greedy, lora_request=requests)

    with LLM(deep_target, {"method": "off"}, enable_lora=True, **OPTIONS) as llm:
        expected = texts(llm)
    with engines_elsewhere(monkeypatch) if is_elsewhere else nullcontext():
        if not is_elsewhere:
            bind_as_on_a_gpu(monkeypatch)
        with LLM(deep_target, draft, enable_lora=True, **OPTIONS) as llm:
            assert texts(llm) == expected
            runner = llm._running().core.runner
            assert isinstance(runner, OverlappedRunner) and runner.num_used > 5
            check_engine(llm)
