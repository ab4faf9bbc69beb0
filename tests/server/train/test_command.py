import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixed_k import fixed
from running_server import environment
from saying import said
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

from foretoken.engine.llm import LLM
from foretoken.engine.request import SamplingParams
from foretoken.proposers.training.curves import read_rows
from foretoken.proposers.training.reading import DataError
from foretoken.server.exit_status import CONFIG, DATA, INTERRUPTED, USAGE
from foretoken.server.train.command import main
from foretoken.server.train.head import most_guesses, settings_of
from foretoken.server.train.options import Sources, count, head_options, setting
from foretoken.server.train.run import WorkFolder

QUICK = ["--batch-tokens", "256", "--accumulate", "1", "--device", "cpu"]
SMALL = ["--hidden", "32", "--layers", "6", "--heads", "4", "--kv-heads", "2", "--intermediate", "48"]
ASKING = ["--prompts", "20", "--prompt-tokens", "8", "--answer-tokens", "16"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums as chats, and a text long enough to be cut."""
    folder = tmp_path_factory.mktemp("corpus")
    chats = [
        {"messages": [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": f"{a} + {b} = {a + b}"}]}
        for a in range(16)
        for b in range(8)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "notes.md").write_text("".join(f"Note {i}: the quick brown fox jumps over dog {i}.\n\n" for i in range(120)))
    return folder


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target made by the command."""
    out = tmp_path_factory.mktemp("trained") / "target"
    sizes = [*SMALL, "--vocab-size", "512", "--context", "128"]
    assert main(["target", "--data", str(corpus), "--out", str(out), *QUICK, *sizes, "--tokens", "20k"]) == 0
    return out


def test_help_says_how() -> None:
    for argv in [(), ("target",), ("draft",), ("head",), ("ngram-cache",), ("fetch-data",)]:
        command = [sys.executable, "-m", "foretoken", "train", *argv, "--help"]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
        assert ended.returncode == 0 and "examples:" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["haed"], "unknown training 'haed': did you mean head?"),
        (["head", "--method", "eagle4"], "eagle4"),
        (["target", "--out", "x"], "--data"),
        (["target", "--data", "x", "--out", "y", "--tokens", "some"], "'some' is not a whole number"),
        (["target", "--data", "x", "--out", "y", "--hidden", "30"], "--hidden 30 must be a multiple"),
        (["target", "--data", "x", "--out", "y", "--batch-tokens", "1"], "--batch-tokens must be at least 2"),
        (["draft", "--data", "x", "--out", "y", "--model", "z", "--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
    ],
)
def test_mistakes_in_flags_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(argv)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert status == USAGE and not said.out
    assert re.fullmatch(r"foretoken: error: .*\n", said.err) and message in said.err


def test_mistakes_in_data_and_model_are_one_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"txt": "b"}\n')
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "mine").write_text("")
    for argv, status, message in [
        (["target", "--data", str(bad), "--out", str(tmp_path / "a")], DATA, f"{bad}:2: has neither `text` nor `messages`"),
        (["target", "--data", str(tmp_path / "no"), "--out", str(tmp_path / "b")], DATA, "no such file or folder"),
        (["target", "--data", str(corpus), "--out", str(kept)], DATA, f"--out {kept} is there already"),
        (["target", "--data", str(corpus), "--out", str(tmp_path / "c"), "--device", "cuda:99"], DATA, "--device cuda:99"),
        (["draft", "--model", str(tmp_path / "no"), "--data", str(corpus), "--out", str(tmp_path / "d")], CONFIG, "there is no folder"),
    ]:
        assert main(argv) == status
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("foretoken: error: ") and message in error, error


def test_a_target_can_be_loaded_and_has_learned(trained: Path) -> None:
    rows = read_rows(trained.with_name("target.work") / "run_text" / "log.csv")
    assert float(rows[-1]["held_out_loss"]) < 5.9 and int(rows[-1]["tokens"]) >= 19_000      # ln 512 is 6.24
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.dtype == torch.bfloat16 and model.config.max_position_embeddings == 128 and model.config.num_hidden_layers == 6
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert len(tokenizer) == model.config.vocab_size and tokenizer.model_max_length == 128
    modes = {path.name: oct(path.stat().st_mode) for path in trained.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"], "who may read the one may read the other"


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "eagle", "medusa", "mlp_speculator", "mtp", "dflash", "pard"])
def test_a_drafter_is_trained_on_the_targets_own_answers_and_served(method: str, trained: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    common = ["--model", str(trained), "--data", str(corpus), *QUICK, *ASKING, "--tokens", "600"]
    small = ["--hidden", "32", "--layers", "1", "--intermediate", "48"]
    if method == "draft_model":
        assert main(["draft", "--out", str(out), *common, *small]) == 0
    elif method == "pard":
        assert main(["draft", "--out", str(tmp_path / "draft"), *common, *small]) == 0
        assert main(["head", "--method", "pard", "--set", f"draft={tmp_path / 'draft'}", "--out", str(out), *common]) == 0
    else:
        taps = ["--set", "taps=[1, 3, 5]"] if method == "eagle3" else []       # the usual ones need a deeper target
        assert main(["head", "--method", method, "--num-speculative-tokens", "3", *taps, "--out", str(out), *common]) == 0
    work = out.with_name("drafter.work")
    assert len((work / "answers.jsonl").read_text().splitlines()) == 20
    assert (work / "run_text").exists() == (method == "mlp_speculator")      # which alone has a stage on the data itself
    prompts = ["Note 5: the quick", "3 + 4"]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(trained, fixed({"method": method, "model": str(out), "num_speculative_tokens": 3})) as llm:
        drafted = said(llm, prompts, greedy)
        assert llm.stats().num_draft_tokens > 0
    with LLM(trained, {"method": "off"}) as llm:
        assert said(llm, prompts, greedy) == drafted


def test_a_stopped_training_goes_on_and_ends_as_if_it_had_not(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def argv(name: str) -> list[str]:
        size = ["--hidden", "16", "--layers", "2", "--intermediate", "32", "--vocab-size", "512", "--tokens", "8k"]
        return ["target", "--data", str(corpus), "--out", str(tmp_path / name), *QUICK, *size]

    from foretoken.proposers.training.loop import Run

    step, steps = Run.step, 0

    def stopped_at_20(self: Run) -> object:
        nonlocal steps
        steps += 1
        if steps == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", stopped_at_20)
        assert main(argv("stopped")) == INTERRUPTED
        assert "the same command goes on" in capsys.readouterr().err and not (tmp_path / "stopped").exists()
    assert main(argv("stopped")) == 0 and main(argv("whole")) == 0
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("stopped", "whole"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_training_does_not_go_on_with_these_files(trained: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["target", "--data", str(corpus), "--out", str(trained), *QUICK, *SMALL, "--vocab-size", "600", "--context", "128"]) == DATA
    assert "vocab_size 512" in capsys.readouterr().err


def test_data_that_has_grown_is_not_taken_for_what_was_packed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("one")
    sources = Sources((data,), tmp_path / "out", tmp_path / "work", 0)
    folder = WorkFolder.claim(sources, {})
    folder.packed("text.bounds").write_text("")
    WorkFolder.claim(sources, {})
    (data / "b.txt").write_text("more")
    with pytest.raises(DataError, match="was begun with data_bytes 3"):
        WorkFolder.claim(sources, {})
    shutil.rmtree(data)
    WorkFolder.claim(sources, {})    # what is packed is all that is needed


def test_settings_by_name() -> None:
    flags = ["--method", "mlp_speculator", "--model", "m", "--data", "d", "--out", "o", "--set", "inner_dim=32", "--set", "tied=false"]
    options = head_options([*flags, "--num-speculative-tokens", "4"])
    settings = settings_of(options.method, options.num_speculative_tokens, options.settings)
    assert (settings.inner_dim, settings.tied, settings.num_positions) == (32, False, 4)
    assert settings_of("dflash", 7, {}).block_size == 8      # the anchor is no guess
    assert setting("taps=[1, 2]") == ("taps", (1, 2)) and setting("draft=./a b") == ("draft", "./a b")
    assert [count(text) for text in ("20M", "4k", "1,000", "1.5k")] == [20_000_000, 4000, 1000, 1500]
    with pytest.raises(DataError, match="inner_dim=128"):
        settings_of("mlp_speculator", None, {"width": 3})
    with pytest.raises(DataError, match="foretoken train draft"):
        settings_of("pard", 3, {})
    assert settings_of("eagle3", None, {"taps": [2, 5, 8]}).taps == (2, 5, 8), "as recipes have them"
    assert settings_of("eagle", None, {"noise": 0}).noise == 0 and settings_of("dflash", None, {"mask_token": 0}).mask_token == 0
    for method, name, value, words in [
        ("mlp_speculator", "inner_dim", "wide", "--set inner_dim=wide: input should be a valid integer"),
        ("mlp_speculator", "inner_dim", -5, "--set inner_dim=-5: it must be at least 1"),
        ("mtp", "num_steps", 0, "--set num_steps=0: it must be at least 1"),
        ("medusa", "own_heads", 1, "--set own_heads=1: input should be a valid boolean"),
        ("medusa", "decay", -0.5, "--set decay=-0.5: it must be at least 0"),
        ("dflash", "taps", 3, "--set taps=3: input should be a valid tuple"),
    ]:
        with pytest.raises(DataError, match=re.escape(words)):
            settings_of(method, None, {name: value})


@pytest.mark.parametrize(
    ("method", "settings", "most"),
    [("medusa", {"num_heads": 3}, 3), ("mlp_speculator", {"num_positions": 4}, 4), ("dflash", {"block_size": 4}, 3), ("mtp", {}, None)],
)
def test_no_more_is_announced_than_a_head_guesses(method: str, settings: dict[str, int], most: int | None) -> None:
    """The command that is printed would be refused."""
    assert most_guesses(settings_of(method, None, settings)) == most


def test_a_draft_of_other_tokens_is_not_adapted(trained: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--method", "pard", "--set", "draft=foretoken-demo/draft_model", "--data", str(corpus), "--out", str(tmp_path / "pard")]
    assert main(["head", *flags, "--model", str(trained)]) == DATA
    error = capsys.readouterr().err
    assert "--set draft=foretoken-demo/draft_model: token id" in error and "the target's own vocabulary" in error
    assert not (tmp_path / "pard.work").exists(), "it is known before the target has answered anything"


@pytest.mark.parametrize("method", ["mtp", "uno", "pard"])
def test_what_a_head_cannot_be_made_for_is_said_before_the_target_answers(
    method: str, trained: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = tmp_path / "windows"
    config = AutoConfig.from_pretrained(trained).to_dict() | {"model_type": "mistral", "sliding_window": 8}
    MistralForCausalLM(MistralConfig.from_dict(config)).save_pretrained(windows)
    AutoTokenizer.from_pretrained(trained).save_pretrained(windows)
    model = ["--model", str(trained), "--set", f"draft={windows}"] if method == "pard" else ["--model", str(windows)]
    if method != "pard":
        (windows / "model.safetensors").unlink()             # gigabytes, which are read once: to train
    out = tmp_path / "head"
    assert main(["head", "--method", method, *model, "--data", str(corpus), "--out", str(out), *QUICK, *ASKING]) == DATA
    assert re.search("needs a (target of type|target whose layers all|draft whose layers all)", capsys.readouterr().err)
    assert [path.name for path in out.with_name("head.work").iterdir()] == ["settings.json"]


def test_fetch_data_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "corpora.jsonl").write_text('{"text": "other"}\n')
    assert main(["fetch-data", "--data", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "0 ok, 1 changed, 18 missing" in said and "changed  json/corpora" in said
    assert "https://github.com/tldr-pages/tldr/tree/08e345f" in said and "CC-BY-4.0" in said
