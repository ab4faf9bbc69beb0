import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretoken.proposers.training.family import Family
from foretoken.proposers.training.model_card import write_card


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A target of 1,000,006 values and a Medusa head of 12; a folder that was only begun."""
    folder = tmp_path / "family"
    tensors = {"target": [(1000, 1000), (6,)], "medusa": [(3, 4)]}
    for name, shapes in tensors.items():
        (folder / name).mkdir(parents=True)
        weights = {f"w{number}": torch.zeros(shape, dtype=torch.bfloat16) for number, shape in enumerate(shapes)}
        save_file(weights, folder / name / "model.safetensors")
    (folder / "mtp").mkdir()
    return folder


def acceptance(method: str, domain: str, k: int, length: float, most: int, passes: int = 10) -> dict[str, Any]:
    return {
        "method": method, "domain": domain, "k": k, "most": most, "answers": 4, "same_answers": 4, "passes": passes, "drafts": 5,
        "accepted": 0, "drafted": 5 * most, "mu": length - 1, "mean_accepted_length": length,
    }


def evaluation() -> dict[str, Any]:
    def transcript(answer: str, fault: str | None, **extra: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "x" * 2000}]
        return {"messages": messages, "tools": [], "answer": answer, "finish_reason": "stop", "fault": fault} | extra

    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}]}
    tools = {
        "messages": [{"role": "user", "content": "What time is it?"}, call, {"role": "tool", "content": "noon"}],
        "tools": [{"function": {"name": "get_time"}}], "finish_reason": "length",
    }
    return {
        "machine": "2 cores of a test", "prompts_per_domain": 4, "max_tokens": 64,
        "domains": {
            "json": {"well_formed": {"json": [3, 4]}, "transcripts": [transcript("# not a heading\n```", "does not parse")]},
            "tools": {"well_formed": {"json": [1, 1], "tool call": [0, 2]}, "transcripts": [transcript("It is", None, **tools)]},
        },
        "perplexity": [
            {"domain": "json", "tokens": 1200, "perplexity": 1.234}, {"domain": "all", "tokens": 1300, "perplexity": 2.5},
        ],
        "acceptance": [
            acceptance(method, domain, k, length, min(k, most))
            for method, most, length in (("ngram", 64, 1.25), ("medusa", 4, 2.5)) for domain in ("json", "tools", "all") for k in (3, 5)
        ],
    }


def test_a_card_says_what_the_files_say(family: Path, tmp_path: Path) -> None:
    (family / "target" / "facts.json").write_text(json.dumps({"tokens": 20_000_000, "seconds": 5400, "machine": "2 CPU cores"}))
    (family / "medusa" / "curves.png").write_bytes(b"")
    (tmp_path / "work" / "medusa").mkdir(parents=True)
    (tmp_path / "work" / "medusa" / "log.csv").write_text("step,tokens,loss,held_out_loss\n1,10,5.0,4.5\n2,20,4.0,3.25\n3,30,3.9,\n")
    write_card(family, Family.load(), evaluation(), tmp_path / "work")
    card = (family / "README.md").read_text()

    assert "| `target/` | 1,000,006 | 2.00 |" in card and "| `medusa/` | 12 | 0.00 |" in card and "`mtp/`" not in card
    assert "| `target/` | 20.00 | 90 | 2 CPU cores | 2 x 4,096 tokens a step, lr 0.003" in card
    assert "- [medusa](medusa/curves.png)" in card and "target/curves.png" not in card
    assert "| `medusa/` | loss 3.250 |" in card, "the last held-out loss that was measured"
    assert "| 80% | 4 of 5 |" in card and "| 0% | 0 of 2 |" in card, "forms are added up over domains"
    assert "| ngram | 1.25 | 1.25 | 1.25 | 0.25 | 50% |" in card and "| medusa (k = 4) | 2.50 | 2.50 | 2.50 | 1.50 | 50% |" in card
    assert "| perplexity | 1.23 | 2.50 |" in card and "| tokens | 1,200 | 1,300 |" in card
    assert "16 of 16 answers were token for token" in card
    assert "**json** (not well-formed: does not parse)" in card and "\n# not a heading" not in card
    assert "[... 800 more characters]" in card
    assert '    [tools on offer] get_time\n    [user] What time is it?\n    [assistant] get_time({"city": "Rome"})\n    [tool] noon' in card
    assert "    [answer] It is [cut off]" in card
    assert "| books/children | [mlschmitt/classic-books-markdown]" in card and "CC-BY-4.0" in card


def test_a_counted_part_has_runs_and_no_curves(family: Path, tmp_path: Path) -> None:
    tensors = {f"{name}.{n}": torch.zeros(5 * n) for n in (1, 2) for name in ("runs", "next", "chance")}
    (family / "ngram_cache").mkdir()
    save_file(tensors, family / "ngram_cache" / "model.safetensors")
    facts = {"tokens": 930_000, "seconds": 1, "machine": "cpu", "held_out_right": 0.4284, "held_out_expected": 0.4416}
    (family / "ngram_cache" / "facts.json").write_text(json.dumps(facts))
    write_card(family, Family.load(), None, tmp_path / "work")
    card = (family / "README.md").read_text()
    assert "| `ngram_cache/` | 15 runs | 0.00 | n-gram cache:" in card and "curves.png" not in card
    assert "| `ngram_cache/` | 0.93 | 0 | cpu | runs of up to 4 tokens that came 4 times, the 21,700 that help most |" in card
    assert "| `ngram_cache/` | accuracy 0.428, expected by itself 0.442 |" in card


def test_what_is_not_known_is_left_out(family: Path) -> None:
    write_card(family, Family.load(), None)
    card = (family / "README.md").read_text()
    assert "## Parts" in card and "## Results" not in card and "million tokens read" not in card and "Curves" not in card
    assert "\n\n\n" not in card
