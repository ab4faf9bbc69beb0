import json
import os
from pathlib import Path

import pytest

from foretoken.engine.config import DEMO_MODEL, AdapterConfig, AdapterModule, EngineConfig
from foretoken.engine.errors import ConfigError
from foretoken.engine.vllm_flags import SWITCHES, TAKING_A_VALUE, TAKING_VALUES
from foretoken.proposers.config import DraftModelConfig, MtpConfig, NgramConfig
from foretoken.server.config import ServerConfig
from foretoken.server.flags import ELSEWHERE
from foretoken.server.run_batch_options import BatchParser
from foretoken.server.serve_parser import ServeParser
from foretoken.server.tls import TlsConfig


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FORETOKEN_")]:
        monkeypatch.delenv(name)


def read(*argv: object) -> ServerConfig:
    return ServerConfig.from_cli([str(word) for word in argv])


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line on stderr of a command line that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        read(*argv)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("foretoken: error: ") and message.count("\n") == 1
    return message


def test_nothing_given_is_the_embedded_model_on_loopback() -> None:
    assert read() == ServerConfig(engine=EngineConfig())
    assert read().engine.model.model == DEMO_MODEL
    assert read().host == "127.0.0.1" and read().port == 8000 and not read().api_keys


def test_every_flag_reaches_its_setting() -> None:
    config = read(
        *("T", "--served-model-name", "a", "b", "--dtype", "float", "--max-model-len", "2k", "--revision", "main"),
        *("--executor", "transformers", "--seed", 7, "--tensor-parallel-size", 1, "--max-num-seqs", 9, "--max-num-batched-tokens", "1K"),
        *("--max-draft-tokens-per-step", 33, "--kv-cache-gb", 0.5, "--gpu-memory-utilization", 0.6, "--no-enable-prefix-caching"),
        *("--max-queued-requests", 5, "--host", "::1", "--port", 9, "--insecure-no-auth"),
        *("--api-key", "k1", "--api-key", "k2:priority=-3"),
        *("--allowed-origins", '["https://a.example"]', "--max-body-bytes", 1000, "--drain-timeout", 1.5, "--log-level", "debug"),
        *("--request-timeout", 90, "-q", "INT4", "--kv-cache-dtype", "int8", "--threads", 3),
        *("--tokenizer", "W", "--uds", "S", "--root-path", "/a/b/", "--ssl-keyfile", "K", "--ssl-certfile=C", "--ssl-cert-reqs", 2),
    )
    model, cache, scheduler = config.engine.model, config.engine.cache, config.engine.scheduler
    assert (model.model, model.served_model_name, model.dtype, model.max_model_len) == ("T", "a", "float32", 2000)
    assert (model.revision, model.executor, model.seed) == ("main", "transformers", 7)
    assert (model.quantization, model.kv_cache_dtype, model.threads) == ("int4", "int8", 3)
    assert (cache.kv_cache_gb, cache.memory_share, cache.enable_prefix_caching) == (0.5, 0.6, False)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_draft_tokens_per_step) == (9, 1024, 33)
    assert config.max_queued_requests == config.engine.max_queued_requests == 5
    assert (config.host, config.port, config.api_keys, config.insecure_no_auth) == ("::1", 9, ("k1", "k2"), True)
    assert config.key_priorities == (0, -3)
    assert (model.tokenizer, config.uds, config.root_path, config.tls) == ("W", "S", "/a/b", TlsConfig("K", "C", None, 2))
    assert (config.allowed_origins, config.allowed_origin_regex) == (("https://a.example",), None)
    assert (config.max_body_bytes, config.drain_timeout_s, config.request_timeout_s, config.log_level) == (1000, 1.5, 90, "debug")
    assert config.served_model_names == ("a", "b")


def test_what_requests_leave_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sampling, kwargs = '{"temperature": 0.6}', '{"enable_thinking": false}'
    whole = ["--override-generation-config", sampling, f"--default-chat-template-kwargs={kwargs}"]
    for words in (whole, ["--override-generation-config.temperature", "0.6", "--default_chat_template_kwargs.enable-thinking=false"]):
        config = ServerConfig.from_cli(["--generation-config", "vllm", *words])
        assert (config.engine.model.generation_config, config.engine.model.override_generation_config) == ("vllm", {"temperature": 0.6})
        assert config.default_chat_template_kwargs == {"enable_thinking": False} and not capsys.readouterr().err
    (tmp_path / "server.yaml").write_text("default-chat-template-kwargs: {date_string: 2026-07-26}")
    assert read("--config", tmp_path / "server.yaml").default_chat_template_kwargs == {"date_string": "2026-07-26"}
    for day in ("2026-07-26", "{no YAML"):
        assert read("--default-chat-template-kwargs.date_string", day).default_chat_template_kwargs == {"date_string": day}
    for wrong, told in (("[1]", "must be a JSON object"), ("{temperature: 1}", "no JSON: "), ("[" * 100_000, "no JSON: ")):
        with pytest.raises(SystemExit):
            ServerConfig.from_cli(["--override-generation-config", wrong])
        assert f"--override-generation-config: {told}" in capsys.readouterr().err


def test_cache_sizes_in_the_words_of_vllm() -> None:
    assert read("--kv-cache-memory-bytes", 2**29).engine.cache.kv_cache_gb == 0.5
    assert read("--kv-cache-memory-bytes", 2**29, "--kv-cache-gb", 2).engine.cache.kv_cache_gb == 2
    assert read("--num-gpu-blocks-override", 77).engine.cache.num_blocks == 77


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(read("--api-key", "secret"))
    with pytest.raises(ConfigError, match="needs a whole number as N") as caught:  # else that ending would be a part of the key
        read("--api-key", "secret:priority=high")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [("T",), ("--model", "T"), ("--model=T",), ("--model", "T", "T"), ("--port", "1", "T"), ("T", "--port", "1"), ("--", "T"),
     ("--enforce-eager", "T"), ("--swap-space", "4", "T"), ("--insecure-no-auth", "T")],
)
def test_the_model_in_any_place(argv: tuple[str, ...]) -> None:
    assert read(*argv).engine.model.model == "T"


def test_two_models_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "two models: T and --model U" in refusal(capsys, "T", "--model", "U")
    assert "one MODEL at most, not T U" in refusal(capsys, "T", "U")


def test_command_line_beats_file_beats_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: F\nport: 2\nserved_model_name: [f, g]\nenable-prefix-caching: false\nmax-model-len:\napi-key: [x, y]\n")
    monkeypatch.setenv("FORETOKEN_PORT", "3")
    monkeypatch.setenv("FORETOKEN_HOST", "::1")
    monkeypatch.setenv("FORETOKEN_API_KEY", "env-key")
    monkeypatch.setenv("FORETOKEN_LOG_LEVEL", "")  # set and empty counts as not set
    assert (read().port, read().host, read().api_keys, read().log_level) == (3, "::1", ("env-key",), "info")
    config = read("--config", file)
    assert (config.port, config.host, config.api_keys) == (2, "::1", ("x", "y"))
    assert config.engine.model.model == "F" and config.served_model_names == ("f", "g")
    assert not config.engine.cache.enable_prefix_caching and config.engine.model.max_model_len is None
    config = read("--config", file, "--port", 1, "M", "--api-key", "mine", "--enable-prefix-caching")
    assert (config.port, config.engine.model.model, config.api_keys) == (1, "M", ("mine",))
    assert config.engine.cache.enable_prefix_caching
    monkeypatch.setenv("FORETOKEN_CONFIG", str(file))
    assert read().port == 2


def test_a_drafter_is_taken_whole_from_one_source(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("speculative-config:\n  method: draft_model\n  model: D\n  num_speculative_tokens: 3\n")
    assert _proposers(read("T", "--config", file)) == (DraftModelConfig("D", 3),)
    assert _proposers(read("T", "--config", file, "--speculative-model", "[ngram]")) == (NgramConfig(5, 4, 1),)


def test_mistakes_in_a_file_or_the_environment_name_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    mistakes = {
        "prot: 1": "did you mean --port", "- 1": "must map", "a: [": "cannot be read", "port: x": "--port",
        "prot:": "did you mean --port", "enable-prefix-cashing: false": "did you mean", "spec-method: off": "--spec-method",
    }
    for text, message in mistakes.items():
        file.write_text(text)
        error = refusal(capsys, "--config", file)
        assert message in error and str(file) in error
    assert "cannot be read" in refusal(capsys, "--config", tmp_path / "missing.yaml")
    file.write_text("config: other.yaml")
    assert "a file cannot name another" in refusal(capsys, "--config", file)
    monkeypatch.setenv("FORETOKEN_PORT", "http")
    assert "environment: argument --port: 'http' is not a port" in refusal(capsys)


def test_what_a_file_switches_off_or_leaves_empty_is_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port:\nenable-prefix-caching: false\ninsecure-no-auth: false\nssl-keyfile:\n")
    config = read("--config", file)
    assert config.port == 8000 and not config.engine.cache.enable_prefix_caching and not config.insecure_no_auth
    assert not capsys.readouterr().err


def test_every_flag_of_serve_may_be_a_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORETOKEN_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("FORETOKEN_REQUEST_TIMEOUT", "9")
    monkeypatch.setenv("FORETOKEN_INSECURE_NO_AUTH", "1")  # a switch
    monkeypatch.setenv("FORETOKEN_ENABLE_PREFIX_CACHING", "False")
    monkeypatch.setenv("FORETOKEN_BATCH_INVARIANT", "0")
    monkeypatch.setenv("FORETOKEN_HELP", "1")
    monkeypatch.setenv("FORETOKEN_MAX_NUM_SEQ", "9")
    monkeypatch.setenv("FORETOKEN_CACHE", "kept")
    config = read()
    assert capsys.readouterr().err.splitlines() == [
        "foretoken: warning: FORETOKEN_HELP is no setting",
        "foretoken: warning: FORETOKEN_MAX_NUM_SEQ is no setting: did you mean FORETOKEN_MAX_NUM_SEQS?",
    ]
    assert config.engine.scheduler.max_num_seqs == 8 and config.request_timeout_s == 9 and config.insecure_no_auth
    assert not config.engine.cache.enable_prefix_caching
    monkeypatch.setenv("FORETOKEN_INSECURE_NO_AUTH", "perhaps")
    assert "environment: argument --insecure-no-auth" in refusal(capsys)


def test_what_kubernetes_says_of_services_is_no_setting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"PORT": "tcp://10.0.0.1:80", "SERVICE_HOST": "10.0.0.1", "PORT_80_TCP_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv("FORETOKEN_" + name, value)
        monkeypatch.setenv("FORETOKEN_API_" + name, value)
    assert read().port == 8000 and not capsys.readouterr().err


def test_flags_of_other_commands_are_no_variables() -> None:
    assert {"input", "concurrency"}.isdisjoint(BatchParser().settings) and BatchParser().settings == ServeParser().settings


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--num-speculative-token", "5"), "unknown flag --num-speculative-token: did you mean --num-speculative-tokens?"),
        (("--enforce-eagr",), "did you mean --enforce-eager?"),
        (("--nonsense",), "unknown flag --nonsense; `foretoken serve --help`"),
        (("--speculative-eagle-topk=4",), 'unknown flag --speculative-eagle-topk: here it is "eagle_topk" in --speculative-config'),
        (("-ngl", "99"), "unknown flag -ngl: here it is --device"),
        (("--port.number", "9"), "unknown flag --port.number: did you mean --port?"),
        (("--port", "70000"), "not a port"),
        (("--max-num-seqs", "0"), "not a positive integer"),
        (("--max-model-len", "1.5"), "not a positive integer"),
        (("--gpu-memory-utilization", "1.5"), "above 0 and at most 1"),
        (("--kv-cache-gb", "0"), "above 0"),
        (("--drain-timeout", "nan"), "not a number"),
        (("--api-key", ""), "not empty"),
        (("--api-key", "a b"), "without spaces"),
        (("--served-model-name", "a", ""), "'' is not a name"),
        (("--lora-modules", "a=b", "c"), "'c' is not NAME=FOLDER (a MODEL stands before the flag)"),
        (("--lora-modules", "a,b=c"), "has no commas"),
        (("--lora-modules", '{"name": "a"}'), 'is not {"name": NAME, "path": FOLDER}'),
        (("--lora-paths", "a=b"), "here it is --lora-modules NAME=FOLDER"),
        (("--config", "/no/such/file"), "foretoken: error: --config /no/such/file cannot be read"),
        (("--dtype", "int3"), "--dtype"),
        (("--allowed-origins", "[1]"), "1 is not * or an origin"),
        (("--allowed-origins", "https://a.example, b.example"), '"b.example" is not * or an origin'),
        (("--allowed-origins", "https://a.example/"), "without a path"),
        (("--allowed-origins", "https://*.example"), "is not * or an origin"),
        (("--allowed-origins", "[x"), "not a JSON list"),
        *((("--root-path", path), "is no path such as /name") for path in ("name", "/v1/")),
        (("--port",), "expected one argument"),
    ],
)
def test_mistakes_of_form_end_with_one_line(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, *argv)


def test_flags_of_vllm_without_meaning_warn_once_and_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    config = read(
        *("--trust_remote_code", "T", "--swap-space", "-1", "--enable-chunked-prefill", "False", "--no-enable-log-requests"),
        *("--default-mm-loras", "a=b", "c=d", "--compilation-config.level", "3", "-O3", "--enforce-eager", "--enforce-eager=True"),
        *("--dtype", "half", "-q", "None", "--max-num-queued-tokens", "9", "--seed", "-7"),
    )
    assert config.engine.model.model == "T" and config.engine.model.seed == -7 and config.engine.model.dtype == "auto"
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("foretoken: warning: ") for line in lines)
    assert "foretoken: warning: --trust-remote-code has no effect: code from a model folder is never run" in lines
    (plain,) = [line for line in lines if "no meaning here" in line]
    assert plain.count("--enforce-eager") == 1
    for name in "--swap-space --max-num-queued-tokens --enable-chunked-prefill --no-enable-log-requests --compilation-config -O3".split():
        assert name in plain
    assert config.engine.model.quantization == "none"
    assert any("--dtype half is not served" in line for line in lines)


def test_no_flag_is_in_two_tables() -> None:
    tables = [SWITCHES, TAKING_A_VALUE, TAKING_VALUES, frozenset(ELSEWHERE), frozenset(ServeParser().flags)]
    assert sum(map(len, tables)) == len(frozenset().union(*tables))


def test_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules, as_json = (AdapterModule("a", "A=1"), AdapterModule("b", "B")), '{"name": "b", "path": "B", "base_model_name": "any"}'
    wanted = AdapterConfig(modules, max_loras=3, max_lora_rank=64)
    assert read("T", "--max-loras", 3, "--max-lora-rank", 64, "--lora-modules", "a=A=1", as_json).engine.adapters == wanted
    assert read("T", "--enable-lora").engine.adapters == AdapterConfig() and read("T").engine.adapters is None
    file = tmp_path / "server.yaml"
    file.write_text("lora-modules: [a=A=1, {name: b, path: B}]\nmax-loras: 3\nmax_lora_rank: 64")
    assert read("--config", file).engine.adapters == wanted
    assert read("T", "--max-loras", 2, "--lora-dtype", "auto").engine.adapters is None
    told = capsys.readouterr().err
    assert "--max-loras has no effect without --enable-lora" in told and "adapters have the model's dtype" in told
    monkeypatch.setenv("FORETOKEN_LORA_MODULES", f"[{as_json}]")
    assert read("T").engine.adapters == AdapterConfig(modules[1:])
    for flags, message in (
        (("--served-model-name", "x", "b"), "'b' is the model's own name; give the adapter another"),
        (("--lora-modules", "a=A", "a=B"), "two adapters are named 'a'"),
        (("--lora-modules", "a=A", "b=B", "--max-loras", 1), "max_loras 1 is not between 2 and"),
    ):
        with pytest.raises(ConfigError, match=message):
            read("T", *flags)
    assert read("--allow-runtime-lora-updating").allow_runtime_lora_updating
    for text, allowed in (("1", True), ("True", True), ("0", False), ("", False)):
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", text)
        assert read().allow_runtime_lora_updating is allowed


def test_tensor_parallelism_is_refused_with_the_devices_found() -> None:
    for flag in ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "--data-parallel-size"):
        with pytest.raises(ConfigError, match=r"4 is not available: a server uses one device; found here: 1 CPU|GPU"):
            read("T", flag, 4)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size 2 is not available"):
        read("T", "--speculative-config", '{"method": "draft_model", "model": "D", "draft_tensor_parallel_size": 2}')


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="every running request needs one token"):
        read("--max-num-seqs", 64, "--max-num-batched-tokens", 32)
    with pytest.raises(ConfigError, match="move the other --spec... flags into it"):
        read("--speculative-config", '{"method": "ngram"}', "--num-speculative-tokens", 3)
    with pytest.raises(ConfigError, match="belong to --speculative-model"):
        read("--speculative-model", "D", "--ngram-prompt-lookup-max", 3)
    for flags, message in {
        ("--quantization", "hqq"): "'hqq' is not available: there are int8 .*; how a quantised checkpoint is stored needs no name",
        ("--kv-cache-dtype", "fp8_e5m2"): "'fp8_e5m2' is not one of .*; narrow caches are int8 on CPUs and fp8",
        ("--executor", "program"): "not one of auto, native, torch, transformers",
        ("--speculative-model", "D", "--speculative-model-quantization", "gptq"): "must be 'int8' or 'fp8' or 'int4' or 'none'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read("T", *flags)
    with pytest.raises(ConfigError, match="is lossy"):
        read("--spec-decoding-acceptance-method", "typical_acceptance_sampler")


def test_dotted_speculative_config() -> None:
    config = read("T", "--speculative-config.method", "ngram", "-sc.num-speculative-tokens=3", "--speculative_config.prompt_lookup_max", 4)
    assert _proposers(config) == (NgramConfig(3, 4, 4),)


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc", "--speculative_config"])
def test_speculative_config_as_json_yaml_or_file(flag: str, tmp_path: Path) -> None:
    wanted = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    file = tmp_path / "speculation.yaml"
    file.write_text("method: ngram\nnum_speculative_tokens: 2\nprompt_lookup_max: 3\n")
    for text in (json.dumps(wanted), file.read_text(), f"@{file}"):
        assert _proposers(read("T", flag, text)) == (NgramConfig(2, 3, 3),)


def test_corpora_and_synthetic_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic = ("T", "-sc", '{"method": "synthetic", "synthetic_acceptance_rates": [0.7]}')
    with pytest.raises(ConfigError, match="outputs would be nonsense; for benchmarks say --allow-synthetic-acceptance"):
        read(*synthetic)
    engine = read(*synthetic, "--allow-synthetic-acceptance", "--speculation-corpus-dir", "D").engine
    assert engine.allow_synthetic_acceptance and engine.speculation_corpus_dir == "D"
    monkeypatch.setenv("FORETOKEN_SPECULATION_CORPUS_DIR", "E")
    assert read("T").engine.speculation_corpus_dir == "E" and not read("T").engine.allow_synthetic_acceptance


def test_mtp_layers_of_the_served_model_are_its_drafter() -> None:
    assert _proposers(read("T", "-sc", '{"method": "mtp", "model": "T"}')) == (MtpConfig(),)
    assert _proposers(read("T", "--spec-method", "mtp", "--spec-model", "U")) == (MtpConfig(model="U"),)


def test_a_broken_speculative_config_says_what(tmp_path: Path) -> None:
    for text in ("{", '{"method": "ngramm"}', "[]", f"@{tmp_path}/missing", '{"method": "ngram", "prompt_lookup_max": 0}'):
        with pytest.raises(ConfigError, match="^speculative config: "):
            read("T", "--speculative-config", text)


def _proposers(config: ServerConfig) -> tuple[object, ...]:
    assert config.engine.speculative is not None
    return config.engine.speculative.proposers
