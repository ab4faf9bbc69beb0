"""EleutherAI's lm-evaluation-harness: log-likelihoods by echo, generation, and chat, with a task of our own that needs no download."""

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer

pytest.importorskip("tenacity")  # of the extra lm-eval[api]
simple_evaluate: Any = pytest.importorskip("lm_eval").simple_evaluate
Instance: Any = pytest.importorskip("lm_eval.api.instance").Instance
get_model: Any = pytest.importorskip("lm_eval.api.registry").get_model
TaskManager: Any = pytest.importorskip("lm_eval.tasks").TaskManager

pytestmark = pytest.mark.slow

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
output_type: {kind}
{rest}
"""
CHOICE = 'doc_to_choice: ["Paris", "Rome", "Madrid", "Tokyo"]\ndoc_to_target: number\nmetric_list: [{metric: acc}]'
WRITE = 'doc_to_target: city\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]'


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "capitals.jsonl"
    rows = [{"country": country, "city": city, "number": number} for number, (country, city) in enumerate(CAPITALS.items())]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, kind, rest in (("capitals_choice", "multiple_choice", CHOICE), ("capitals_write", "generate_until", WRITE)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, rest=rest, file=file), encoding="utf-8")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def arguments(model_name: str, url: str, api_key: str) -> dict[str, Any]:
    told = {"model": model_name, "base_url": url, "auth_token": api_key, "tokenizer_backend": "remote"}
    return told | {"num_concurrent": 4, "max_retries": 1}


def test_log_likelihoods_are_the_servers_own(server: RunningServer, api_key: str, openai_environment: str) -> None:
    """What the model says greedily is greedy to the harness, with the sum of the log probabilities that came with it."""
    url = server.url + "/v1/completions"
    body = {"model": openai_environment, "prompt": "The sky is", "temperature": 0, "max_tokens": 6, "logprobs": 1}
    said = httpx.post(url, json=body, headers={"Authorization": f"Bearer {api_key}"}, timeout=60).json()["choices"][0]
    model = get_model("local-completions")(**arguments(openai_environment, url, api_key))
    pairs = [("The sky is", said["text"]), ("The sky is", " zzz qqq")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    (greedy_sum, is_greedy), (other_sum, other_is_greedy) = model.loglikelihood(requests)
    assert is_greedy and not other_is_greedy and other_sum < greedy_sum
    assert math.isclose(greedy_sum, sum(said["logprobs"]["token_logprobs"]), abs_tol=0.05)


def test_tasks_by_completions(server: RunningServer, api_key: str, openai_environment: str, tasks: Any) -> None:
    told = arguments(openai_environment, server.url + "/v1/completions", api_key)
    names = ["capitals_choice", "capitals_write"]
    results: Any = simple_evaluate(model="local-completions", model_args=told, tasks=names, task_manager=tasks, bootstrap_iters=0)
    assert {results["n-samples"][name]["effective"] for name in names} == {len(CAPITALS)}
    assert 0 <= results["results"]["capitals_choice"]["acc,none"] <= 1
    assert all(len(sample["resps"][0][0]) > 0 for sample in results["samples"]["capitals_write"])


def test_tasks_by_chat(server: RunningServer, api_key: str, openai_environment: str, tasks: Any) -> None:
    told = arguments(openai_environment, server.url + "/v1/chat/completions", api_key) | {"tokenizer_backend": None}
    results: Any = simple_evaluate(
        model="local-chat-completions", model_args=told, tasks=["capitals_write"], task_manager=tasks, apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert all(len(sample["resps"][0][0]) > 0 for sample in results["samples"]["capitals_write"])
