"""Write target and draft as folders that transformers loads, with a model card measured on what was written."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .evaluate import evaluate, greedy_answer, spread
from .mixture import PackedData
from .model_card import TrainingFacts, model_card

NAMES = ("target", "draft")
QUESTIONS = (
    "Hello!",
    "What is the capital of France?",
    "How do I use tar?",
    "Write a Python program for bubble sort.",
    "Tom has 3 boxes with 4 apples each. He eats 2 apples. How many apples are left?",
)


def export(
    models: tuple[LlamaForCausalLM, LlamaForCausalLM], data: PackedData, facts: TrainingFacts, work: Path, out: Path
) -> None:
    """Write target/, draft/, README.md and loss.png under `out`. The models are left as they are.

    The weights come first, so that they are there even if time runs out while they are being measured. Every file is
    written under `work` and then replaces the old one in a single step: whoever loads meanwhile reads whole files.
    """
    staging = work / "export"
    shutil.rmtree(staging, ignore_errors=True)
    for model, name in zip(models, NAMES, strict=True):
        write_model(model, data.tokenizer, staging / name)
    publish(staging, out)

    target, draft = (LlamaForCausalLM.from_pretrained(staging / name, dtype=torch.float32) for name in NAMES)
    quality = evaluate(target, draft, data.held_out, spread(data.prompts, 24))
    samples = list(answers(target, data.tokenizer, QUESTIONS))
    (staging / "README.md").write_text(model_card(facts, quality, samples), encoding="utf-8")
    plot_losses(work / "log.csv", staging / "loss.png")
    publish(staging, out)


def publish(staging: Path, out: Path) -> None:
    """Copy every file under `staging` to its place under `out`; a reader sees the old file or the new one."""
    for source in sorted(path for path in staging.rglob("*") if path.is_file()):
        destination = out / source.relative_to(staging)
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = destination.with_name(destination.name + ".partial")
        shutil.copyfile(source, partial)
        os.replace(partial, destination)


def write_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A folder with bfloat16 weights, configuration, tokenizer and chat template."""
    half = LlamaForCausalLM(model.config).bfloat16()
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str], new_tokens: int = 64
) -> Iterator[tuple[str, str]]:
    """Each question with the greedy answer to it, asked through the chat template."""
    for question in questions:
        asked = [{"role": "user", "content": question}]
        text = str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
        answer = greedy_answer(model, tokenizer(text, add_special_tokens=False)["input_ids"], new_tokens)
        yield question, str(tokenizer.decode(answer, skip_special_tokens=True))


def plot_losses(table: Path, image: Path) -> None:
    """Training losses over tokens as a small PNG; nothing if matplotlib is not installed or nothing was logged."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not table.exists():
        return
    with table.open() as lines:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
    axes = (figure := Figure(figsize=(7, 3.5))).subplots()
    tokens = [row["tokens"] / 1e6 for row in rows]
    for model in NAMES:
        axes.plot(tokens, [row[f"{model}_loss"] for row in rows], label=model, linewidth=0.8)
    axes.set(xlabel="million tokens", ylabel="cross-entropy, nats per token")
    axes.legend()
    figure.savefig(image, dpi=90, bbox_inches="tight")

