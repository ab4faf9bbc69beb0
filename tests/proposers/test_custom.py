"""Proposers from users' own files, the documented example first of all."""

import re
from pathlib import Path
from typing import Any

import pytest
from fixed_k import fixed
from last_state_runs import Run, opened, resources
from saying import said

from foretoken import LLM, SamplingParams
from foretoken.proposers import custom
from foretoken.proposers.base import Draft, Needs
from foretoken.proposers.config import CustomConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.custom import Setup
from foretoken.proposers.loading import LoadedProposer

DOCS = Path(__file__).parents[2] / "docs" / "proposers.md"


def _example(folder: Path) -> Path:
    """The documented file, word by word."""
    match = re.search(r"<!-- example: (\S+) -->\n```python\n(.*?)```\n<!-- end of example -->", DOCS.read_text(), re.DOTALL)
    assert match is not None, "the example stands between markers"
    assert len(match[2].splitlines()) <= 24, "a short example is the point"
    file = folder / match[1]
    file.write_text(match[2])
    return file


def _load(file: Path, name: str, k: int = 4, **options: object) -> LoadedProposer:
    return custom.load(CustomConfig(f"{file}:{name}", k, options), resources(file.parent))


def _written(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text("from foretoken.proposers.base import Needs\nfrom foretoken.proposers.custom import ChainProposer\n" + text)
    return file


def test_the_documented_example_guesses_what_followed_last_time(tmp_path: Path) -> None:
    loaded = _load(_example(tmp_path), "Bigram")
    assert loaded.name == "bigram"
    proposer = loaded.open(opened("bigram_2"))
    assert proposer.name == "bigram_2" and proposer.max_tokens == 4 and proposer.needs == Needs()
    run = Run(proposer)
    run.add("r", 3)
    run.texts["r"].tokens = [1, 2, 3, 1, 9, 1]
    assert run.step({"r": 3})["r"].tokens == [9, 1, 9]
    narrow = Run(_load(_example(tmp_path), "Bigram", window=1).open(opened()))
    narrow.add("r", 3)
    narrow.texts["r"].tokens = [1, 2, 1]
    assert narrow.step({"r": 3})["r"].tokens == []


def test_the_documented_example_changes_nothing_of_what_is_said(tmp_path: Path) -> None:
    file = _example(tmp_path)
    config = {"method": "custom_class", "custom_class": f"{file}:Bigram", "num_speculative_tokens": 3, "options": {"window": 64}}
    prompts = ["one two three one two three one two", "Hello! How are you"]
    each: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
    for settings in each:
        texts = []
        for speculative in (config, {"method": "off"}):
            with LLM(speculative_config=fixed(speculative), kv_cache_gb=0.1, executor="torch", dtype="float32") as llm:
                texts.append(said(llm, prompts, SamplingParams(max_tokens=24, ignore_eos=True, **settings)))
                if speculative is config:
                    health = {p.name: p for p in llm._running().core.proposers.stats()}
                    assert health["bigram"].num_failures == 0 and health["bigram"].draft_seconds > 0
        assert texts[0] == texts[1]


def test_the_constructor_is_told_what_it_may_use(tmp_path: Path) -> None:
    file = _written(
        tmp_path,
        "class Mine(ChainProposer):\n"
        "    def __init__(self, setup):\n"
        "        super().__init__(setup)\n"
        "        self.setup = setup\n"
        "    def guess(self, token_ids, k):\n"
        "        return [1] * (k + 5)\n",
    )
    proposer = _load(file, "Mine", 3, depth=7).open(opened())
    setup: Setup = proposer.setup  # type: ignore[attr-defined]
    assert setup.num_speculative_tokens == 3 and setup.options == {"depth": 7} and setup.target.vocab_size == 50
    run = Run(proposer)
    run.add("r", 3)
    assert run.step({"r": 9})["r"].tokens == [1, 1, 1], "too many are cut"


def test_guesses_may_be_of_any_kind_of_integer_and_the_text_may_be_written_to(tmp_path: Path) -> None:
    file = _written(
        tmp_path,
        "import itertools, numpy, torch, beside_mine\n"
        "class Mine(ChainProposer):\n"
        "    def guess(self, token_ids, k):\n"
        "        token_ids.clear()\n"
        "        return eval(self.options['guess'])\n",
    )
    (tmp_path / "beside_mine.py").write_text("SEVEN = 7\n")
    for guess in ("numpy.array([7] * 9)", "torch.tensor([7] * 9)", "itertools.repeat(beside_mine.SEVEN)"):
        run = Run(_load(file, "Mine", guess=guess).open(opened()))
        run.add("r", 3)
        assert run.step({"r": 3})["r"].tokens == [7, 7, 7] and all(type(token) is int for token in run.texts["r"].tokens)
        assert len(run.texts["r"].tokens) >= 3, "what is known stays"
    for guess in ("None", "[1.5]", "'abc'"):
        run = Run(_load(file, "Mine", guess=guess).open(opened()))
        run.add("r", 3)
        with pytest.raises(TypeError, match=r"guess\(\) must return token ids, not "):
            run.step({"r": 3})


def test_a_module_is_found_by_its_name() -> None:
    loaded = custom.load(CustomConfig(f"{__name__}:Whole"), resources(Path(".")))
    assert loaded.open(opened("x")).name == "x"


class Whole:
    """All of the interface, without a base."""

    name = "whole"
    needs = Needs()
    max_tokens = 2

    def __init__(self, setup: Setup) -> None:
        pass

    def propose(self, context: object) -> Draft:
        raise NotImplementedError

    observe = forget = check = close = propose


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("class Other: pass\n", "Mine", r"has no class 'Mine'; it has Other"),
        ("Mine = 3\n", "Mine", r"has no class 'Mine'; it has none"),
        ("import missing_library\n", "Mine", r"cannot be imported: ModuleNotFoundError: No module named 'missing_library'"),
        ("class Mine(:\n", "Mine", r"cannot be imported: SyntaxError"),
        ("class Mine:\n    def __init__(self, s): raise OSError('no file')\n", "Mine", r"OSError: no file \(line 4\)"),
        ("class Mine:\n    pass\n", "Mine", r"cannot be constructed: TypeError"),
        (
            "class Mine:\n    max_tokens = 99\n    def __init__(self, setup): pass\n    def propose(self, context): pass\n",
            "Mine",
            r"no proposer: name must be of up to.*needs must be.*max_tokens must be.*not 99; it lacks observe\(\), forget\(\), check",
        ),
        ("class Mine(ChainProposer):\n    name = 'off'\n", "Mine", "name must be of up to 64 letters, .*, not 'off'"),
        ("class Mine(ChainProposer):\n    name = property(lambda self: 'mine')\n", "Mine", "name must be an attribute that can be set"),
        ("class Mine(ChainProposer):\n    needs = Needs(hidden=(99,))\n", "Mine", r"needs.hidden must be .* 0 to \d+, .* not \(99,\)"),
        ("class Mine(ChainProposer):\n    needs = Needs(hidden=3)\n", "Mine", "needs.hidden must be .* not 3"),
        ("class Mine(ChainProposer):\n    needs = Needs(hears='all')\n", "Mine", "hears must .*'ends'.*, not 'all'"),
        ("class Mine(ChainProposer):\n    needs = Needs(kv_layers=(1,))\n", "Mine", "needs.kv_layers must be empty"),
        ("import sys\nsys.exit(3)\n", "Mine", r"cannot be imported: SystemExit: 3 \(line 4\)"),
    ],
)
def test_what_is_no_proposer_is_refused_with_the_reason(text: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpeculativeConfigError, match=message):
        _load(_written(tmp_path, text), name)


def test_missing_files_and_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpeculativeConfigError, match=r"there is no file .*nowhere\.py"):
        _load(tmp_path / "nowhere.py", "Mine")
    with pytest.raises(SpeculativeConfigError, match=r"there is no module 'no_such_module'; install it, or name a file"):
        custom.load(CustomConfig("no_such_module.inner:Mine"), resources(tmp_path))


def test_a_chain_proposer_without_a_guess_says_what_is_missing(tmp_path: Path) -> None:
    run = Run(_load(_written(tmp_path, "class Mine(ChainProposer): pass\n"), "Mine").open(opened()))
    run.add("r", 3)
    with pytest.raises(NotImplementedError, match=r"Mine must have a method guess"):
        run.step({"r": 2})
