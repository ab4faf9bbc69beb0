"""States on disk are those of the texts, whatever was accepted, in however many parts, shards and processes."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from last_state_runs import Run, opened, resources, state_of
from safetensors import safe_open

from foretoken import LLM, SamplingParams
from foretoken.engine.plan import PlanRow, StepPlan
from foretoken.engine.request import Request
from foretoken.engine.runner import batch_lists
from foretoken.proposers import hidden_states
from foretoken.proposers.base import Draft, DraftContext
from foretoken.proposers.config import HiddenStatesConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.hidden_states import HiddenStatesProposer

LAYERS = (2, -1)


class Guessing(HiddenStatesProposer):
    """Beside a proposer whose guesses are accepted at random: here it is the same object."""

    def propose(self, context: DraftContext) -> Draft:
        draft = Draft.chains([[1, 2, 3][: row.ceiling] for row in context.rows])
        return Draft(draft.token_ids, draft.start_loc, [-1 if i % 2 else parent for i, parent in enumerate(draft.parents)], draft.source)


def _run(folder: Path, max_shard_tokens: int, layers: tuple[int, ...] = LAYERS, seed: int = 2) -> Run:
    loaded = hidden_states.load(HiddenStatesConfig(str(folder), layers, max_shard_tokens), resources(folder))
    proposer: Any = loaded.open(opened())
    proposer.__class__ = Guessing
    return Run(proposer, seed)


def _read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """request -> its parts, in the order of the index."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    index = json.loads((folder / "index.json").read_text())
    assert sorted(entry["file"] for entry in index["shards"]) == sorted(path.name for path in folder.glob("states-*"))
    for entry in index["shards"]:
        with safe_open(folder / entry["file"], framework="pt") as file:
            metadata = file.metadata()
            requests, tensors = json.loads(metadata["requests"]), {name: file.get_tensor(name) for name in file.keys()}
        assert json.loads(metadata["layers"]) == index["layers"] and metadata["dtype"] == entry["dtype"] == "float32"
        offsets = tensors["offsets"].tolist()
        assert len(requests) == len(offsets) - 1 == entry["num_parts"] and offsets[-1] == entry["num_tokens"]
        for i, request in enumerate(requests):
            rows = slice(offsets[i], offsets[i + 1])
            part = {name: tensors[name][rows] for name in tensors if name.startswith(("hidden", "token_ids"))}
            found[request].append({**part, "start": int(tensors["start"][i]), "finished": bool(tensors["finished"][i])})
    return found


def _assert_true(parts: Sequence[dict[str, Any]], text: Sequence[int], cached: int = 0, layers: Sequence[int] = LAYERS) -> None:
    """The parts are the text from its first computed token to its last but one, with the states of all."""
    at = cached
    for part in parts:
        assert part["start"] == at
        tokens = part["token_ids"].tolist()
        assert tokens == list(text[at : at + len(tokens)])
        for boundary in layers:
            expected = torch.stack([state_of(text[: p + 1], boundary) for p in range(at, at + len(tokens))])
            assert torch.equal(part[f"hidden.{boundary}"], expected)
        at += len(tokens)
    assert at == len(text) - 1
    assert [part["finished"] for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize("max_shard_tokens", [8, 40, 10_000])
def test_everything_that_was_computed_is_written_once(max_shard_tokens: int, tmp_path: Path) -> None:
    run = _run(tmp_path, max_shard_tokens)
    texts: dict[str, tuple[list[int], int]] = {}
    for i in range(12):
        cached = 4 * (i % 3 == 1)
        run.add(f"r{i}", 6 + i, cached=cached)
        for step in range(5):
            ceilings = {name: (step + i) % 4 for name in run.texts}
            end = [name for name, text in run.texts.items() if len(text.tokens) > 24 and len(text.tokens) - text.computed == 1]
            run.step(ceilings, end=end)
            for name in end:
                texts[name] = run.texts.pop(name).tokens, 4 * (int(name[1:]) % 3 == 1)
    run.proposer.close()
    found = _read(tmp_path)
    unfinished = {name for name, parts in found.items() if not parts[-1]["finished"]}
    assert set(found) - unfinished == set(texts) and unfinished <= set(run.texts) and len(texts) > 6
    for name, (text, cached) in texts.items():
        _assert_true(found[name], text, cached)
    num_shards = len(list(tmp_path.glob("states-*")))
    assert num_shards == 1 if max_shard_tokens == 10_000 else num_shards > 2
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


def test_aborted_and_preempted_requests_leave_nothing_behind(tmp_path: Path) -> None:
    run = _run(tmp_path, 1000)
    for name in ("aborted", "preempted", "whole"):
        run.add(name, 7)
    run.step({})
    run.step({"whole": 3})
    run.proposer.forget("aborted")
    del run.texts["aborted"]
    run.proposer.forget("preempted")
    run.texts["preempted"].computed = 4  # its first block was still in the prefix cache
    run.step({})
    run.step({}, end=["whole", "preempted"])
    run.proposer.close()
    found = _read(tmp_path)
    assert set(found) == {"whole", "preempted"}
    _assert_true(found["preempted"], run.texts["preempted"].tokens, cached=4)


def test_further_processes_add_to_the_folder(tmp_path: Path) -> None:
    runs = [_run(tmp_path, 1000, seed=i) for i in range(2)]
    texts = {}
    for i in (0, 1, 0, 1):
        run, name = runs[i], f"process {i}, {len(texts)}"
        run.add(name, 4)
        run.step({}, order=[name], end=[name])
        texts[name] = run.texts.pop(name).tokens
        run.proposer._write()  # type: ignore[attr-defined]
    (tmp_path / "index.json").unlink()  # as if killed between shard and index
    last = _run(tmp_path, 1000, seed=9)
    last.add("last", 4)
    last.step({}, end=["last"])
    last.proposer.close()
    assert sorted(path.name for path in tmp_path.glob("states-*")) == [f"states-{i:06d}.safetensors" for i in range(5)]
    found = _read(tmp_path)
    for name, text in texts.items():
        _assert_true(found[name], text)


def test_a_folder_of_other_layers_or_models_is_refused(tmp_path: Path) -> None:
    run = _run(tmp_path / "states", 1000)
    run.add("r", 4)
    run.step({}, end=["r"])
    run.proposer.close()
    with pytest.raises(SpeculativeConfigError, match=r"holds states of states, layers \[2, -1\] .* not of states, layers \[3\]"):
        _run(tmp_path / "states", 1000, layers=(3,))
    (tmp_path / "states" / "index.json").write_text("{}")
    with pytest.raises(SpeculativeConfigError, match="is no index of hidden states"):
        _run(tmp_path / "states", 1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeculativeConfigError, match="cannot be made"):
        _run(tmp_path / "file" / "inner", 1000)


@pytest.mark.parametrize("layers", [(9,), (-2,), (1, 1)])
def test_layers_that_are_not_there_are_refused(layers: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(SpeculativeConfigError, match="'layers' must be different boundaries from 0 to 8"):
        _run(tmp_path, 1000, layers)


@pytest.mark.parametrize(("num_layers", "expected"), [(32, (2, 16, 29, -1)), (4, (1, 2, -1)), (1, (0, -1))])
def test_without_layers_those_of_eagle_3_and_the_last(num_layers: int, expected: tuple[int, ...], tmp_path: Path) -> None:
    loaded = hidden_states.load(HiddenStatesConfig(str(tmp_path)), resources(tmp_path, num_layers=num_layers))
    assert loaded.open(opened()).needs.hidden == tuple(sorted(expected))
    assert "after the final norm" in loaded.found[0]


def test_an_engine_writes_what_its_requests_computed(tmp_path: Path) -> None:
    """With guesses of another proposer beside it; the states are those of a pass over the whole text."""
    collecting = {"method": "extract_hidden_states", "directory": str(tmp_path), "layers": [1, -1]}
    config = [{"method": "ngram", "num_speculative_tokens": 3}, collecting]
    prompts = ["one two three one two three one two", "for i in range(10):\n    print(i)\nfor i in range(10):"]
    with LLM(speculative_config=config, kv_cache_gb=0.1, executor="torch", dtype="float32") as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), use_tqdm=False)
        executor = llm._running().model.executor
    found = _read(tmp_path)
    assert len(found) == len(prompts)
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    for parts in found.values():
        (part,) = parts
        tokens = part["token_ids"].tolist()
        text = next(text for text in texts if text[:-1] == tokens)
        request = Request("whole", tuple(text), SamplingParams(), 0.0, 1, 0)
        row = PlanRow(request, 0, len(text), [], [], [], range(64), samples=True)
        output = executor.run(batch_lists(StepPlan([row], 16), lambda r: False).batch(), executor.allocate(64, 16), (1, -1))
        for boundary in (1, -1):
            torch.testing.assert_close(part[f"hidden.{boundary}"], output.hidden[boundary][:-1].float(), rtol=1e-4, atol=1e-4)
