import json
from pathlib import Path

import pytest

from foretoken.engine.bench.speculation import Method
from foretoken.engine.config import DEMO_MODEL
from foretoken.engine.errors import ConfigError
from foretoken.engine.model_folder import find_folder
from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.server.bench.speculation_methods import find_methods


def names(methods: tuple[Method, ...]) -> list[str]:
    return [method.name for method in methods]


def test_a_model_by_itself_has_the_methods_without_weights(tiny_target: Path) -> None:
    assert names(find_methods(str(tiny_target), None)) == ["ngram", "suffix", "lookahead"]
    assert names(find_methods(str(tiny_target), None, ["suffix"])) == ["suffix"]


def test_the_embedded_model_has_its_drafters() -> None:
    methods = {method.name: method for method in find_methods(DEMO_MODEL, None)}
    assert {"ngram", "suffix", "draft_model", "ngram_cache"} <= methods.keys()
    for method in methods.values():
        (entry,) = method.config(3)
        if "model" in entry:
            assert entry["model"] == f"{DEMO_MODEL}/{method.name}", "it must not name a folder of this machine"
            assert find_folder(entry["model"], None, lambda line: None).is_dir()
        parsed = parse_speculative_config(entry, DEMO_MODEL)
        assert parsed.adaptive and parsed.disable_by_batch_size is None and not parsed.warnings


def test_a_family_is_known_by_its_folders(tmp_path: Path) -> None:
    for name in ("target", "draft_model", "medusa", "ngram_cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    methods = find_methods(str(tmp_path / "target"), None)
    assert names(methods) == ["ngram", "suffix", "draft_model", "medusa", "ngram_cache"]
    assert methods[2].entries[0]["model"] == str(tmp_path / "draft_model")
    assert methods[4].entries == ({"method": "ngram_cache", "model": str(tmp_path / "ngram_cache")},)


def test_a_configured_list_is_tried_one_by_one_and_together(tmp_path: Path) -> None:
    config = [{"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}, {"method": "ngram", "prompt_lookup_max": 3}]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for text in (json.dumps(config), f"@{file}"):
        methods = find_methods("m", text)
        assert names(methods) == ["ngram", "ngram 2", "together"]
        assert methods[0].entries == ({"method": "ngram"},), "k and whether it adapts are what is tried"
        assert len(methods[2].entries) == 2
    assert names(find_methods("m", "method: suffix")) == ["suffix"]


def test_a_draft_is_known_by_its_content(tiny_draft: Path) -> None:
    assert names(find_methods("m", json.dumps({"model": str(tiny_draft)}))) == ["draft_model"]


@pytest.mark.parametrize(
    ("config", "wanted", "words"),
    [
        ('{"method": "off"}', (), "nothing to compare"),
        ("[]", (), "nothing to compare"),
        ('["ngram"]', (), "an object or a list of objects"),
        ("5", (), "--speculative-config"),
        ('{"method": "ngram"}', ("eagle3",), "there is no eagle3 for m; there are ngram"),
        ("@/nowhere/at/all", (), "cannot read"),
    ],
)
def test_mistakes(config: str, wanted: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_methods("m", config, wanted)
