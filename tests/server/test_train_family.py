"""`foretoken train family` from corpora of a few records to folders that serve: every part, a stop in the middle, a second call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.engine.llm import LLM
from foretoken.engine.request import SamplingParams
from foretoken.proposers.training.fetch_data import CORPORA
from foretoken.server.cli import DATA, USAGE
from foretoken.server.train_command import main

RECIPE = """
seed = 0
[tokenizer]
vocab_size = 512
characters = 20_000
domains = { code = 0.5, chat = 0.5 }
[target]
shape = { hidden = 32, layers = 2, heads = 4, kv_heads = 2, intermediate = 48 }
tokens = 12_000
batch_tokens = 512
accumulate = 2
[[target.stages]]
share = 0.4
domains = { code = 0.5, books = 0.5 }
[[target.stages]]
share = 0.6
domains = { small_exercises = 0.5, arithmetic = 0.5 }
[refinement]
domains = ["arithmetic"]
prompts = 30
samples = 2
other_prompts = 4
answer_tokens = 24
tokens = 1_000
batch_tokens = 512
[answers]
prompts = 24
held_out_prompts = 6
answer_tokens = 12
[drafters.draft_model]
method = "draft_model"
shape = { hidden = 16, layers = 1, heads = 2, kv_heads = 2, intermediate = 32 }
tokens = 1_000
batch_tokens = 512
[drafters.eagle3]
method = "eagle3"
draft_vocab_size = 128
tokens = 1_000
batch_tokens = 512
[drafters.mlp_speculator]
method = "mlp_speculator"
inner_dim = 8
tokens = 2_000
batch_tokens = 512
[drafters.pard]
method = "pard"
shape = { hidden = 32, layers = 1, heads = 2, kv_heads = 2, intermediate = 32 }
num_tokens = 4
tokens = 1_000
batch_tokens = 512
[drafters.mtp]
method = "mtp"
intermediate_size = 16
tokens = 1_000
batch_tokens = 512
[drafters.ngram_cache]
method = "ngram_cache"
max_n = 2
min_count = 2
max_runs = 40
"""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few records under every name that the recipe reads."""
    folder = tmp_path_factory.mktemp("corpora")
    for corpus in CORPORA:
        path = folder / f"{corpus.name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        if corpus.name.startswith("chat/"):
            asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.\n#### 4"}]
            records = [{"id": str(n), "messages": [*asked, {"role": "user", "content": f"{n}"}]} for n in range(20)]
        else:
            records = [{"id": f"{n}.py", "text": f"def f{n}(x):\n    return x + {n}\n" * 8} for n in range(20)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_family_from_corpora_to_folders_that_serve(corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, work, out = tmp_path / "family.toml", tmp_path / "work", tmp_path / "family"
    recipe.write_text(RECIPE)
    command = ["family", "--config", str(recipe), "--data", str(corpora), "--work", str(work), "--out", str(out), "--device", "cpu"]
    assert main([*command, "--only", "target"]) == 0
    weights = (out / "target" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "prompts.jsonl", "target"]
    assert weights != (work / "unrefined" / "model.safetensors").read_bytes(), "it was refined"
    assert json.loads((out / "target" / "refinement_facts.json").read_text())["tokens"] > 0
    assert "`target/`, refined" in (out / "README.md").read_text()

    assert main(command) == 0                                  # the rest; what is there stays
    assert (out / "target" / "model.safetensors").read_bytes() == weights
    for name in ("target", "draft_model", "eagle3", "mlp_speculator", "pard", "mtp"):
        facts = json.loads((out / name / "facts.json").read_text())
        assert facts["tokens"] > 500 and (out / name / "curves.png").exists()
    counted = json.loads((out / "ngram_cache" / "facts.json").read_text())
    assert counted["tokens"] > 50 and 0 <= counted["held_out_right"] <= 1
    assert sorted(path.name for path in (out / "ngram_cache").iterdir()) == ["config.json", "facts.json", "model.safetensors"]
    said = capsys.readouterr().err
    assert "foretoken train evaluate" in said and "tokens of held-out answers" in said
    card = (out / "README.md").read_text()
    assert "`mlp_speculator/`" in card and "`ngram_cache/`" in card and (out / "prompts.jsonl").exists()
    assert "mtp/curves.png" in card and "ngram_cache/curves.png" not in card

    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    plain = LLM(str(out / "target"), dtype="float32", speculative_config={"method": "off"}).generate("Write", greedy)[0]
    for method in ("draft_model", "eagle3", "mlp_speculator", "pard", "mtp", "ngram_cache"):
        config = {"method": method, "model": str(out / method), "num_speculative_tokens": 3}
        drafted = LLM(str(out / "target"), dtype="float32", speculative_config=config).generate("Write", greedy)[0]
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_mistakes_are_one_line(corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data", str(corpora), "--work", str(tmp_path / "w"), "--out", str(tmp_path / "o")]
    with pytest.raises(SystemExit) as ended:
        main(["family", *where, "--only", "eagle9"])
    assert ended.value.code == USAGE and "the recipe has no eagle9" in capsys.readouterr().err
    misspelt = tmp_path / "misspelt.toml"
    misspelt.write_text(RECIPE.replace("max_runs", "most_runs"))
    assert main(["family", *where, "--config", str(misspelt)]) == DATA
    assert "most_runs" in capsys.readouterr().err
    broken = tmp_path / "broken.toml"
    broken.write_text("[target\n")
    assert main(["family", *where, "--config", str(broken)]) != 0
    assert str(broken) in capsys.readouterr().err
    assert main(["family", *where[2:], "--data", str(tmp_path)]) != 0
    assert "lacks" in capsys.readouterr().err
