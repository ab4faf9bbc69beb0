"""Command lines and scripts that users of vLLM have, with nothing changed but the program's and the models' names."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from running_server import RunningServer
from saying import token_ids

from foretoken import LLM, Counter, Gauge, GuidedDecodingParams, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt, Vector
from foretoken.engine.errors import ContextTooLong, InvalidRequest
from foretoken.engine.request import LoRARequest
from foretoken.proposers.config import DraftModelConfig, EagleConfig, MedusaConfig, NgramConfig, ProposerConfig, SpeculativeConfig
from foretoken.server.config import ServerConfig

NGRAM_JSON = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":5,"prompt_lookup_min":2}'
OLD_NGRAM = "serve --model T --speculative-model '[ngram]' --num-speculative-tokens 5"
PROMPTS = ["The quick brown fox", "def add(a, b):", "one two one two one"]


def read(command: str) -> ServerConfig:
    """What the server makes of a command line as a shell would split it."""
    program, *words = shlex.split(command)
    assert program == "serve"
    return ServerConfig.from_cli(words)


def speculative(command: str) -> SpeculativeConfig:
    config = read(command)
    assert config.engine.model.model == "T" and config.engine.speculative is not None
    return config.engine.speculative


@pytest.fixture
def folder_with_d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter without a method is recognised by what is in its folder."""
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "proposer"),
    [
        (OLD_NGRAM + " --ngram-prompt-lookup-max 4", NgramConfig(5, prompt_lookup_max=4, prompt_lookup_min=1)),
        (OLD_NGRAM, NgramConfig(5, prompt_lookup_max=4, prompt_lookup_min=1)),
        (OLD_NGRAM.replace("'[ngram]'", "[ngram]"), NgramConfig(5, prompt_lookup_max=4, prompt_lookup_min=1)),
        (OLD_NGRAM.replace("'[ngram]'", "ngram"), NgramConfig(5, prompt_lookup_max=4, prompt_lookup_min=1)),
        (OLD_NGRAM + " --ngram-prompt-lookup-min 2 --ngram-prompt-lookup-max 3", NgramConfig(5, 3, 2)),
        (OLD_NGRAM + " --ngram-prompt-lookup-min 6", NgramConfig(5, 6, 6)),
        ("serve --model T --speculative-model '[ngram]'", NgramConfig(5, 4, 1)),
        ("serve T --spec-method ngram --spec-tokens 3", NgramConfig(3, 4, 1)),
        ("serve T --num-speculative-tokens 3", NgramConfig(3, 4, 1)),
        ("serve --model T --speculative-model D --num-speculative-tokens 5", DraftModelConfig("D", 5)),
        ("serve --model T --speculative-model D --num-speculative-tokens 5 --tensor-parallel-size 1", DraftModelConfig("D", 5)),
        (
            "serve --model T --speculative-model D --num-speculative-tokens 5 --speculative-max-model-len 256 "
            "--speculative-draft-tensor-parallel-size 1 --speculative-model-quantization int8",
            DraftModelConfig("D", 5, max_model_len=256, quantization="int8"),
        ),
        ("serve T --spec-method draft_model --spec-model D --spec-tokens 4", DraftModelConfig("D", 4)),
        (f"serve T --speculative-config '{NGRAM_JSON}'", NgramConfig(5, 5, 2)),
        ("""serve T --speculative-config '{"method":"ngram"}'""", NgramConfig(5, 5, 5)),
        ("""serve T --speculative-config '{"method":"ngram","prompt_lookup_max":3}'""", NgramConfig(5, 3, 3)),
        (
            """serve T --speculative-config '{"method":"draft_model","draft_model":"D","num_speculative_tokens":3}'""",
            DraftModelConfig("D", 3),
        ),
        ("""serve T --speculative-config '{"method":"medusa","num_heads":4}'""", MedusaConfig(None, 4, 4)),
        (
            """serve T --speculative-config '{"model":"E","draft_tensor_parallel_size":1,"num_speculative_tokens":5,"method":"eagle"}'""",
            EagleConfig("E", "eagle", 5),
        ),
        ("serve T --speculative-config 'method: ngram\nnum_speculative_tokens: 4\nprompt_lookup_max: 4\n'", NgramConfig(4, 4, 4)),
    ],
)
def test_the_drafter_a_command_line_asks_for(command: str, proposer: ProposerConfig, folder_with_d: None) -> None:
    assert speculative(command).proposers == (proposer,)


def test_limits_of_old_flags() -> None:
    assert speculative(OLD_NGRAM + " --speculative-disable-by-batch-size 4").disable_by_batch_size == 4
    assert speculative(OLD_NGRAM).disable_by_batch_size == SpeculativeConfig().disable_by_batch_size
    assert speculative(OLD_NGRAM + " --spec-decoding-acceptance-method rejection_sampler").proposers


def test_files(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("method: ngram\nnum_speculative_tokens: 4\nprompt_lookup_max: 4\n")
    for value in (config.read_text(), f"@{config}"):
        assert speculative(f"serve T --speculative-config {shlex.quote(value)}").proposers == (NgramConfig(4, 4, 4),)
    server = tmp_path / "server.yaml"
    server.write_text("model: T\nport: 8123\nspeculative-config:\n  method: ngram\n  num_speculative_tokens: 2\nmax-num-seqs: 4\n")
    config = read(f"serve --config {server}")
    assert (config.port, config.engine.scheduler.max_num_seqs) == (8123, 4)
    assert config.engine.speculative == SpeculativeConfig((NgramConfig(2),))


def test_the_container_takes_the_same_flags() -> None:
    """`docker run -p 8000:8000 IMAGE --model T --speculative-model '[ngram]'`: the entry point is `serve` on all interfaces."""
    dockerfile = (Path(__file__).parent.parent / "docker" / "Dockerfile.cpu").read_text()
    (entry,) = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in dockerfile.splitlines() if line.startswith("ENTRYPOINT ")]
    assert entry[0] == "foretoken"
    config = read(shlex.join([*entry[1:], "--model", "T", "--speculative-model", "[ngram]", "--num-speculative-tokens", "5"]))
    assert config.host == "0.0.0.0" and not config.insecure_no_auth and config.engine.model.model == "T"
    assert config.engine.speculative is not None and config.engine.speculative.proposers == (NgramConfig(5, 4, 1),)


def test_common_engine_flags() -> None:
    config = read(
        "serve T --max-model-len 4096 --max-num-seqs 16 --max-num-batched-tokens 1024 --gpu-memory-utilization 0.9 "
        "--served-model-name name --dtype bfloat16 --quantization None --seed 42 --api-key token-abc123 --host 0.0.0.0 --port 8001"
    )
    model, scheduler = config.engine.model, config.engine.scheduler
    assert (model.model, model.max_model_len, model.served_model_name, model.dtype, model.seed) == ("T", 4096, "name", "bfloat16", 42)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (16, 1024)
    assert (config.api_keys, config.host, config.port, config.engine.cache.memory_share) == (("token-abc123",), "0.0.0.0", 8001, 0.9)


def _speculated(server: RunningServer, prompt: str = "one two three one two three one two") -> None:
    """A greedy completion is the same with speculation and without, and speculation really took place."""
    with_drafts = server.complete(prompt, max_tokens=48, ignore_eos=True)
    without = server.complete(prompt, max_tokens=48, ignore_eos=True, speculation={"method": "off"})
    assert with_drafts["choices"] == without["choices"]
    for _ in range(30):  # where guessing does not pay, it is tried in a hundredth of the time all the same
        with server.client() as client:
            metrics = client.get("/metrics").text
        (drafted,) = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_draft_tokens_total{")]
        if float(drafted.split()[-1]) > 0:
            return
        server.complete(prompt, max_tokens=200, ignore_eos=True)
    raise AssertionError("nothing was ever guessed")


def test_serve_ngram_by_old_flags(server_process: Callable[..., RunningServer], tiny_target: Path) -> None:
    server = server_process(
        *("--model", tiny_target, "--speculative-model", "[ngram]", "--num-speculative-tokens", 5, "--ngram-prompt-lookup-max", 4),
        *("--enforce-eager", "--swap-space", 4),
    )
    assert server.log.count("foretoken: warning: ") == 1 and "--enforce-eager, --swap-space" in server.log
    _speculated(server)
    assert server.stop() == 0


def _generate(llm: LLM, **params: object) -> list[list[int]]:
    settings = {"max_tokens": 24, "temperature": 0.0, "top_p": 1.0, "ignore_eos": True} | params
    return token_ids(llm.generate(prompts=PROMPTS, sampling_params=SamplingParams(**settings), use_tqdm=False))  # pyright: ignore


@pytest.fixture(scope="module")
def plain_tokens(tiny_target: Path) -> list[list[int]]:
    """What the target says without any drafter."""
    return _generate(LLM(model=str(tiny_target), speculative_config={"method": "off"}))


@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_a_loop_over_k_and_acceptance_read_offline(k: int, tiny_target: Path, plain_tokens: list[list[int]]) -> None:
    """The target, unquantised, as its own draft: every guess is right, so the figures of each request are known beforehand."""
    draft = {"method": "draft_model", "model": str(tiny_target), "num_speculative_tokens": k, "adaptive": False, "quantization": "none"}
    llm = LLM(model=str(tiny_target), speculative_config=draft)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), use_tqdm=False)
    assert token_ids(outputs) == plain_tokens
    metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    drafts, accepted, by_depth = metrics["drafts"], metrics["accepted_tokens"], metrics["accepted_tokens_per_pos"]
    assert isinstance(drafts, Counter) and isinstance(accepted, Counter) and isinstance(by_depth, Vector)
    assert sum(by_depth.values) == accepted.value > 0 and len(by_depth.values) == k and by_depth.values[0] <= drafts.value
    assert drafts.labels == by_depth.labels and isinstance(metrics["vllm:num_requests_running"], Gauge)
    for output in outputs:
        assert output.metrics is not None
        speculation = output.metrics.speculative_decoding
        assert speculation.num_spec_tokens == k and speculation.draft_acceptance_rate > 0.9
        assert 1 < speculation.mean_acceptance_length <= k + 1
        assert sum(speculation.acceptance_histogram) == speculation.num_spec_steps > 0


@pytest.fixture(scope="module")
def llm(tiny_target: Path) -> LLM:
    return LLM(model=str(tiny_target), speculative_config={"method": "off"}, kv_cache_gb=0.005)


def test_structured_outputs(llm: LLM) -> None:
    forms = [
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"])),
        SamplingParams(guided_decoding=GuidedDecodingParams(regex=r"[0-9]{3}\n", backend="xgrammar"), stop=["\n"]),
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"const": 7})),
        SamplingParams(structured_outputs=StructuredOutputsParams(grammar='root ::= "SELECT " number\nnumber ::= "1 " | "2 "')),
    ]
    texts = [output.outputs[0].text for output in llm.generate(PROMPTS[:1] * 4, forms, use_tqdm=False)]
    assert texts[0] in ("Positive", "Negative") and len(texts[1]) == 3 and texts[1].isdigit() and texts[2] == "7" and "SELECT " in texts[3]
    assert SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)).form is not None
    again = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    for again.structured_outputs in (StructuredOutputsParams(regex="b"), StructuredOutputsParams(regex="c")):
        (output,) = llm.generate("x", again, use_tqdm=False)
        assert output.outputs[0].text == again.structured_outputs.regex
    for wrong in ({}, {"regex": "a", "choice": ["b"]}, {"json": {}, "disable_any_whitespace": True}):
        with pytest.raises(ValueError, match="only json, regex, choice"):
            StructuredOutputsParams(**wrong)
    with pytest.raises(ValueError, match="structured_outputs and guided_decoding each ask"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), guided_decoding=GuidedDecodingParams(regex="a"))


def test_parameters_as_old_scripts_write_them(llm: LLM) -> None:
    """Fields are assigned after construction; what the engine runs with is checked all the same."""
    params = SamplingParams(n=1, best_of=1, use_beam_search=False, length_penalty=1.0, spaces_between_special_tokens=False)
    params.max_tokens = 3
    params.ignore_eos = True
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    (output,) = llm.generate(sampling_params=params, prompt_token_ids=[ids], use_tqdm=False, lora_request=None)
    assert output.prompt_token_ids == ids and len(output.outputs[0].token_ids) == 3 and params.clone() == params
    prompts = [TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt=PROMPTS[0])]
    assert [o.prompt_token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == [ids, ids]
    params.top_p = 2
    with pytest.raises(ValueError, match="top_p must be a number from 0 to 1"):
        llm.generate("x", params)
    with pytest.raises(InvalidRequest, match=r"lora_request needs LLM\(..., enable_lora=True\)"):
        llm.generate("x", lora_request=LoRARequest("sql", 1, "folder"))
    for name, value in {"use_beam_search": True, "best_of": 3, "truncate_prompt_tokens": 5}.items():
        with pytest.raises(ValueError, match=f"{name} is not served"):
            SamplingParams(**{name: value})
    with pytest.raises(ValueError, match="beam search is not served"):
        llm.beam_search([{"prompt": "x"}], params=None)


def test_an_output_ends_where_the_context_does(llm: LLM, tiny_target: Path) -> None:
    (output,) = llm.generate([[5] * 500], SamplingParams(max_tokens=8192, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length"
    with LLM(tiny_target, {"method": "off"}, num_gpu_blocks_override=4) as small, pytest.raises(ContextTooLong, match="KV cache holds"):
        small.generate("x", SamplingParams(max_tokens=8192))


def test_the_models_own_sampling(tiny_target: Path, tmp_path: Path) -> None:
    for file in tiny_target.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 3, "do_sample": true}')
    with LLM(tmp_path, {"method": "off"}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20, max_tokens=3)
        assert len(llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids) <= 3
    with LLM(tmp_path, {"method": "off"}, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_embeddings_and_the_prefix_cache(llm: LLM) -> None:
    outputs = llm.embed(["a text", TextPrompt(prompt="another one"), "a text"], use_tqdm=False)
    vectors = [output.outputs.embedding for output in outputs]
    assert vectors[0] == vectors[2] != vectors[1] and sum(x * x for x in vectors[0]) == pytest.approx(1)
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: the prompt is too long"):
        llm.embed(["fine", [1] * 600])
    long = [TokensPrompt(prompt_token_ids=[7] * 100)]
    cached = [llm.generate(long, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert llm.reset_prefix_cache() and [*cached, llm.generate(long, use_tqdm=False)[0].num_cached_tokens] == [0, 96, 0]
    llm._running().core.check()
