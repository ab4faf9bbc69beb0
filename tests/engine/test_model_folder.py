import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from foretoken.engine.config import DEMO_MODEL
from foretoken.engine.errors import ModelLoadError
from foretoken.engine.model_folder import LFS_POINTER, config_json, find_folder, read_json, weight_files


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "/" + 300 * "a", 5000 * "a/"], ids=len)
def test_paths_are_never_looked_for_on_the_hub(name: str):
    with pytest.raises(ModelLoadError, match="there is no folder"):
        find_folder(name, None, lambda line: pytest.fail(f"asked the hub: {line}"))


def test_the_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="some-org/some-model.*could not be fetched") as error:
        find_folder("some-org/some-model", None, lambda line: None)
    assert "\n" not in str(error.value)


def test_the_embedded_model_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("foretoken.engine.model_folder.__file__", str(tmp_path / "model_folder.py"))
    with pytest.raises(ModelLoadError, match="embedded model"):
        find_folder(DEMO_MODEL, None, lambda line: None)
    target = tmp_path / "demo_model" / "target"
    target.mkdir(parents=True)
    (target / "config.json").touch()
    (target / "model.safetensors").touch()
    assert find_folder(DEMO_MODEL, None, lambda line: None) == target


def test_the_embedded_drafters_are_found_by_their_method():
    assert find_folder("foretoken-demo/draft_model", None, print).name == "draft_model"
    with pytest.raises(ModelLoadError, match="no drafter for method 'gpt'; there are .*draft_model"):
        find_folder("foretoken-demo/gpt", None, print)


def test_a_hub_model_without_safetensors_says_how_to_convert(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, object] = {}

    def snapshot(hub_id: str, **arguments: object) -> str:
        asked.update(arguments)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelLoadError, match="some-org/some-model has no safetensors.*save_pretrained.*converted"):
        find_folder("some-org/some-model", "main", lambda line: None)
    with pytest.raises(ModelLoadError, match="convert it once: so some-org/some-model; then name ./converted"):
        find_folder("some-org/some-model", "main", lambda line: None, lambda hub_id: f"so {hub_id}")
    (tmp_path / "model.safetensors").touch()
    assert find_folder("some-org/some-model", "main", lambda line: None) == tmp_path
    assert asked["revision"] == "main"


def test_the_second_copy_of_mistrals_weights_is_not_fetched():
    from huggingface_hub.utils import filter_repo_objects

    from foretoken.engine.model_folder import HUB_FILES, HUB_FILES_LEFT_OUT

    offered = ["config.json", "model-00001-of-00002.safetensors", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.json"]
    fetched = list(filter_repo_objects(offered, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_LEFT_OUT))
    assert fetched == ["config.json", "model-00001-of-00002.safetensors"]


def test_folders_are_found_without_torch():
    said = "import sys, foretoken.engine.model_folder as m; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_second_copy_in_another_format_is_left_alone(tmp_path: Path):
    for name in ("model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": ["a"]}'])
def test_a_broken_index_is_told(tmp_path: Path, index: str):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match="model.safetensors.index.json"):
        weight_files(tmp_path)


def test_an_index_of_an_earlier_save_is_passed_over(tmp_path: Path):
    """transformers takes the shards away when it saves in one file, but leaves the index."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(ModelLoadError, match="lacks 1 of its 1 weight files"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_files_of_other_names_are_named(tmp_path: Path):
    (tmp_path / "model.fp16.safetensors").touch()
    with pytest.raises(ModelLoadError, match="has no model.safetensors: if model.fp16.safetensors holds the whole network, name it so"):
        weight_files(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ModelLoadError, match="has model-00001-of-00002.safetensors but no model.safetensors.index.json"):
        weight_files(tmp_path)


def test_an_adapter_is_told_from_a_folder_that_is_none(tmp_path: Path):
    """Adapters have no config.json."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some-org/base"}')
    (tmp_path / "adapter_model.safetensors").touch()
    for find in (config_json, weight_files):
        with pytest.raises(ModelLoadError, match="is an adapter.*foretoken serve some-org/base --lora-modules"):
            find(tmp_path)


def test_a_folder_of_the_hubs_cache_is_told_from_the_snapshot_in_it(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="has no config.json: name the folder that holds config.json"):
        config_json(tmp_path)
    snapshot = tmp_path / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    with pytest.raises(ModelLoadError, match=f"has no config.json: name {snapshot}"):
        config_json(tmp_path)


def test_what_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As by the user of a container, of folders that are mounted there. The owner of these tests may read everything."""

    def denied(*args: object, **kwargs: object) -> bool:
        raise PermissionError(13, "Permission denied")

    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("{}")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", denied)
        patched.setattr(Path, "read_text", denied)
        for find, name in ((weight_files, "model.safetensors"), (config_json, "config.json")):
            with pytest.raises(ModelLoadError, match=f"{name} cannot be read .Permission denied.: it must be readable"):
                find(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(ModelLoadError, match=f"{tmp_path} cannot be read"):
            find_folder(str(tmp_path), None, lambda line: None)
    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(ModelLoadError, match=f"{tmp_path} cannot be read"):
        find_folder(str(tmp_path), None, lambda line: None)


def test_pointers_of_git_lfs_are_told_from_damage(tmp_path: Path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(LFS_POINTER + b"v1\noid sha256:0\nsize 12\n")
    for find in (weight_files, lambda folder: read_json(folder, "config.json")):
        with pytest.raises(ModelLoadError, match="only a pointer of Git LFS: run .*git lfs pull"):
            find(tmp_path)
