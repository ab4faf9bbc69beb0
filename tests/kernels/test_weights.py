from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from decoding import Decoding
from pairs import Pair, random_tokens
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, WITH_EXPERTS, random_model, tiny_config

from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.execution import Execution, UnsupportedExecution
from foretoken.kernels.layout import Executor
from foretoken.kernels.program import RowsOf
from foretoken.kernels.stored_tensors import WeightError, read_tensors, sliced
from foretoken.kernels.text_names import text_names
from foretoken.kernels.weights import check_finite, check_tensors, load_program_executor

REFERENCE = Execution(prefer_native=False)
CONFIG = transformers.LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32
)
UP = "model.layers.1.mlp.up_proj.weight"
PARTS = {"q.0": RowsOf("q.weight", (6, 2), 2, 0, 1), "q.1": RowsOf("q.weight", (6, 2), 2, 1, 3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Overwrite, add or (None) remove tensors of the checkpoint."""
    path = folder / "model.safetensors"
    kept = load_file(path)
    for name, tensor in tensors.items():
        kept.pop(name, None)
        if tensor is not None:
            kept[name] = tensor
    save_file({name: tensor.clone() for name, tensor in kept.items()}, path)


def load(folder: Path) -> Executor:
    return load_program_executor(read_tensors([folder / "model.safetensors"]), CONFIG, REFERENCE)


def test_shards_and_a_single_file_hold_the_same_tensors(folder: Path) -> None:
    single = load_file(folder / "model.safetensors")
    transformers.LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder / "shards", max_shard_size="20KB")
    shards = list((folder / "shards").glob("*.safetensors"))
    tensors = read_tensors(shards)
    assert len(shards) > 1
    assert set(tensors) == set(single) and len(tensors) == len(single)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in single.items())


def test_missing_and_unexpected_tensors_are_named_together(folder: Path) -> None:
    change(folder, {UP: None, "model.layers.1.mlp.up_proj.bias": torch.ones(40)})
    with pytest.raises(WeightError, match=f"missing: {UP}; unexpected: model.layers.1.mlp.up_proj.bias"):
        load(folder)


@pytest.mark.parametrize(
    "prefix", ["model.mtp_layers.0.", "mtp.layers.0.", "mtp_layers.0.", "model.mtp_block.0.", "model.mtp.layers.1.", "model.layers.2."]
)
def test_draft_layers_of_the_checkpoint_are_left_to_others(folder: Path, prefix: str) -> None:
    change(folder, {prefix + part: torch.zeros(2) for part in ("eh_proj.weight", "mlp.up_proj.weight")})
    load(folder)


def test_layers_that_the_config_forgets_are_unexpected(folder: Path) -> None:
    change(folder, {"model.layers.2.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(WeightError, match="unexpected: model.layers.2.mlp.up_proj.weight"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    change(folder, {UP: torch.zeros(41, 32)})
    with pytest.raises(WeightError, match=rf"{UP} has shape \(41, 32\), but config.json asks for \(40, 32\)"):
        load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_numbers_are_refused(folder: Path, bad: float) -> None:
    weight = torch.zeros(40, 32, dtype=torch.bfloat16)
    weight[3, 4] = bad
    change(folder, {UP: weight})
    with pytest.raises(WeightError, match=f"{UP} contains NaN or infinite"):
        load(folder)


def test_looking_for_damage_copies_nothing(folder: Path) -> None:
    """Tensors are views of the mapped file: what a check copies would come on top of the packed weights."""
    change(folder, {"big": torch.ones(8192, 2048, dtype=torch.bfloat16)})
    tensors = read_tensors([folder / "model.safetensors"])
    check_finite(tensors)  # what the first call of a torch function sets up is not counted
    with torch.profiler.profile(profile_memory=True) as profile:
        check_finite(tensors)
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.events() or ()) < 2**20


def test_reading_says_how_far_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("foretoken.kernels.weights.PROGRESS_INTERVAL_S", 0.0)
    load_program_executor(read_tensors([folder / "model.safetensors"]), CONFIG, REFERENCE, progress=lines.append)
    assert len(lines) == len(load_file(folder / "model.safetensors")) and lines[-1] == "weights: 0.0 of 0.0 GB"


def test_narrow_formats_need_the_native_executor(folder: Path) -> None:
    with pytest.raises(UnsupportedExecution, match="int8 and int4 need the native executor: "):
        load_program_executor(read_tensors([folder / "model.safetensors"]), CONFIG, Execution(quantization="int8", prefer_native=False))


@pytest.mark.parametrize("family", [family for family in WITH_EXPERTS if family not in ("gpt_oss", "gemma4_moe")])
def test_experts_may_be_in_two_tensors_or_in_three_each(tmp_path: Path, family: str) -> None:
    """transformers saves them as they were published, unless it is told not to."""
    pair, prompt = Pair.save(tiny_config(family), tmp_path / "each"), random_tokens(1, 20, 97)
    pair.model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = {kind: read_tensors(list((tmp_path / kind).glob("*.safetensors"))).keys() for kind in ("each", "fused")}
    assert any(".experts.1." in name for name in names["each"]) and not any(".experts.1." in name for name in names["fused"])
    fused = Pair.load(tmp_path / "fused")
    each, both = (Decoding(executor).feed([prompt]).logits for executor in (pair.executor, fused))
    assert each is not None and both is not None and torch.equal(each, both)


def test_missing_and_misshapen_wholes_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """A program has queries and their gates apart, a checkpoint has not."""
    config, name = tiny_config("qwen3_next"), "model.layers.1.self_attn.q_proj.weight"
    random_model(config).save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")[name]
    for tensor, told in ((None, f"missing: {name}$"), (whole[:-2], rf"{name} has shape \(126, 32\), but config.json asks for \(128, 32\)")):
        change(tmp_path, {name: tensor})
        with pytest.raises(WeightError, match=told):
            load_program_executor(read_tensors([tmp_path / "model.safetensors"]), config, REFERENCE)


def test_rows_of_several_weights_in_one() -> None:
    """Two runs of (1, 2) rows: those at 0 and 3 are the first weight's."""
    tensors = sliced({"q.weight": torch.arange(12.0).view(6, 2), "k.weight": torch.zeros(1)}, PARTS)
    assert set(tensors) == {"q.0", "q.1", "k.weight"} and len(tensors) == 3 and "q.weight" not in tensors
    assert tensors["q.0"].tolist() == [[0, 1], [6, 7]]
    assert tensors["q.1"].tolist() == [[2, 3], [4, 5], [8, 9], [10, 11]]
    assert set(sliced({"q.0": torch.zeros(2, 2)}, PARTS)) == {"q.0"}  # as it is, where there is no whole


@pytest.mark.skipif("gemma4" not in FAMILIES, reason="transformers has no Gemma 4")
def test_what_nobody_reads_may_be_there() -> None:
    """As keys of layers that share those of others are in what is published."""
    program = decoder_program(tiny_config("gemma4"))
    tensors = {name: torch.empty(shape, device="meta") for name, shape in program.weights.items()}
    check_tensors(program, {**tensors, "model.layers.3.self_attn.k_proj.weight": torch.zeros(1)})
    with pytest.raises(WeightError, match="unexpected: model.layers.1.self_attn.k_proj.weight"):
        check_tensors(program, {**tensors, "model.layers.1.self_attn.k_proj.weight.more": torch.zeros(1)})


def test_rows_that_turn_in_pairs_become_halves() -> None:
    """Of each of two heads of five rows four turn; a bias is a vector."""
    rows = torch.arange(10.0)
    for tensor in (rows, rows[:, None].expand(-1, 3)):
        found = sliced({"q.weight": tensor}, {"q.halves": RowsOf("q.weight", tuple(tensor.shape), 2, 0, 5, pairs=4)})["q.halves"]
        assert torch.equal(found, tensor[[0, 2, 1, 3, 4, 5, 7, 6, 8, 9]])


def test_looking_at_shapes_reads_nothing(tmp_path: Path) -> None:
    """Rows that lie apart are copied when they are asked for, and a checkpoint is looked through before any is."""
    save_file({"q.weight": torch.zeros(6, 2), "k.weight": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    shapes = sliced(read_tensors([tmp_path / "model.safetensors"]), PARTS).without_numbers()
    assert {name: tuple(tensor.shape) for name, tensor in shapes.items()} == {"q.0": (2, 2), "q.1": (4, 2), "k.weight": (1,)}
    assert {tensor.device.type for tensor in shapes.values()} == {"meta"} and shapes["k.weight"].dtype == torch.bfloat16


def test_a_whole_that_can_see_is_known_by_the_names_of_its_text() -> None:
    assert text_names(["lm_head.weight", "model.norm.weight"]) == {name: name for name in ("lm_head.weight", "model.norm.weight")}
    newer = ["model.language_model.norm.weight", "model.visual.norm.weight", "lm_head.weight", "mtp.fc.weight"]
    assert text_names(newer) == {"model.norm.weight": newer[0], "lm_head.weight": newer[2], "mtp.fc.weight": newer[3]}
    older = ["language_model.model.norm.weight", "vision_tower.norm.weight", "language_model.lm_head.weight"]
    assert text_names(older) == {"model.norm.weight": older[0], "lm_head.weight": older[2]}


def test_large_finite_numbers_are_not_damage(folder: Path) -> None:
    change(folder, {UP: torch.full((40, 32), 3e38)})  # their sum overflows
    load(folder)


def test_redundant_tensors_of_old_checkpoints_are_ignored(folder: Path) -> None:
    change(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(folder)


def test_files_that_are_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(WeightError, match="model.safetensors is damaged or incomplete"):
        load(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    save_file({UP: torch.zeros(40, 32)}, folder / "other.safetensors")
    with pytest.raises(WeightError, match=f"{UP} is in both"):
        read_tensors(sorted(folder.glob("*.safetensors")))


def test_weights_are_copies_not_views_of_the_files(folder: Path) -> None:
    executor = load(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000:] = b"\x7f" * 1000
    with path.open("r+b") as file:  # in place, as a download over the old file would
        file.write(data)
    output = Decoding(executor, max_len=8).feed([[1, 2, 3, 96, 95]])
    assert output.logits is not None and output.logits.isfinite().all()
