"""`foretoken train family`: the embedded target and all of its drafters, by the recipe in one file, from corpora to folders.

Joins what only reads text (proposers/training) with the engine that writes it. Each part is a run of its own in the work folder: a
part that is finished is not trained again, one that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from ..proposers.training.draft import DraftTrainee
from ..proposers.training.encoding import Prompt, encode_prompt
from ..proposers.training.family import RECIPE, Family, Member, Prepared, Training, hold_out, prepare
from ..proposers.training.frozen import FrozenTarget
from ..proposers.training.loop import Run, Trainee
from ..proposers.training.model_card import write_card
from ..proposers.training.packing import Packed, PackedStream, mean_tokens, write
from ..proposers.training.reading import DataError
from ..proposers.training.target import Shape, TargetTrainee, write_model
from .drafter_data import learned_counts
from .generating import Generation, documents, generate
from .train_head import make_head, settings_of
from .train_options import Parser
from .train_prompts import write_prompts
from .train_run import Machine, show

HELD_OUT_BATCHES = 8
PROMPTS = "prompts.jsonl"
GROUND_TRUTH_SHARE = 0.4             # of an MLP speculator's tokens: its first stage reads the target's own training text

EXAMPLES = """\
examples:
  foretoken train fetch-data --data corpora
  foretoken train family --data corpora --work family-work --out family
  foretoken train family --data corpora --work family-work --out family --only target,eagle3
"""


@dataclass(frozen=True)
class Paths:
    """Where a family is made. `family` is what is published to `out`."""

    data: Path
    work: Path
    out: Path

    @property
    def family(self) -> Path:
        return self.work / "family"

    @property
    def target(self) -> Path:
        return self.family / "target"

    @property
    def evaluation(self) -> Path:
        """Left by `foretoken train evaluate`."""
        return self.work / "evaluation" / "evaluation.json"

    def run(self, name: str) -> Path:
        return self.work / "runs" / name

    def answers(self, held_out: bool) -> Path:
        return self.work / ("answers_held_out" if held_out else "answers")


def main(argv: Sequence[str]) -> int:
    """Make what is missing; returns the exit status."""
    parser = Parser("family", "Make the embedded target and all of its drafters from corpora, by one recipe.", EXAMPLES)
    parser.add_argument("--config", type=Path, default=RECIPE, metavar="FILE", help="recipe (default: the one in the package)")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with the corpora: see foretoken train fetch-data")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for packed text, checkpoints and logs")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for target/, draft_model/, eagle3/, ...")
    parser.add_argument("--only", default="", metavar="NAMES", help="parts to train, by comma (default: target and every drafter)")
    parser.add_argument("--device", default="auto", help="cpu or cuda (default: a GPU if there is one)")
    args = parser.parse_args(argv)
    try:
        family = Family.load(args.config)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{args.config}: {error}") from error
    chosen = [name for name in args.only.split(",") if name] or ["target", *family.members]
    if unknown := set(chosen) - {"target", *family.members}:
        parser.error(f"--only: the recipe has no {', '.join(sorted(unknown))}; it has target, {', '.join(family.members)}")
    make(family, Paths(args.data, args.work, args.out), chosen, Machine.choose(args.device, "auto"))
    return 0


def make(family: Family, paths: Paths, chosen: Sequence[str], machine: Machine) -> None:
    """Train the chosen parts, each from what the parts before it left. Raises KeyboardInterrupt when asked to stop."""
    say("reading and packing the target's text")
    prepared = prepare(family, paths.data, paths.work)
    if "target" in chosen and not (paths.target / "model.safetensors").exists():
        train_target(family, prepared, paths, machine)
    drafters = [name for name in chosen if name != "target"]
    if drafters:
        if not (paths.work / "prompts_held_out.jsonl").exists():
            say("writing the prompts")
            hold_out(family, paths.data, prepared)
        for held_out in (False, True):
            answer(family, prepared, paths, held_out)
    for name in drafters:
        if not (paths.family / name / "model.safetensors").exists():
            train_drafter(family, name, prepared, paths, machine)
    measured = paths.evaluation.exists()
    write_card(paths.family, family, json.loads(paths.evaluation.read_text(encoding="utf-8")) if measured else None, paths.work / "runs")
    if (paths.work / "prompts_held_out.jsonl").exists():
        write_prompts(paths.family / PROMPTS, prepared.prompts(True), family.seed)
    publish(paths.family, paths.out)
    say(f"the family is in {paths.out}" + ("" if measured else f"; measure it, then give this command again for a card with the figures: "
        f"foretoken train evaluate --models {paths.out} --prompts {paths.work / 'prompts_held_out.jsonl'} --out {paths.evaluation.parent}"))


def train_target(family: Family, prepared: Prepared, paths: Paths, machine: Machine) -> None:
    stream = PackedStream([prepared.stage(number) for number in range(len(family.stages))], family.target.batch_tokens)
    torch.manual_seed(family.seed)
    model = family.shape.build(family.vocab_size)
    run = run_of(TargetTrainee(model, family.read_weight), stream, family.target, paths.run("target"), machine, [])
    write_model(model, prepared.tokenizer, paths.target)
    leave_facts(run, paths.target)


def answer(family: Family, prepared: Prepared, paths: Paths, held_out: bool) -> None:
    """Have the target answer prompts of its chats, and pack the answers. Every domain has the same share of them."""
    packed = paths.answers(held_out)
    if packed.with_suffix(".bounds").exists():
        return
    count = family.answers.held_out_prompts if held_out else family.answers.prompts
    tokenizer = prepared.tokenizer
    asked = choose(prepared.prompts(held_out), count, family.seed)
    ids = [encode_prompt(prompt, tokenizer) for prompt in tqdm(asked, desc="prompts", unit=" prompts", leave=False)]
    ids = [prompt for prompt in ids if len(prompt) <= family.answers.prompt_tokens]
    say(f"the target answers {len(ids):,} {'held-out ' if held_out else ''}prompts")
    settings = Generation(family.answers.answer_tokens, family.seed)
    answers = generate(str(paths.target), ids, packed.with_suffix(".jsonl"), settings)
    tokens = write(packed, documents(answers), family.vocab_size)
    say(f"packed {tokens:,} tokens")


def choose(prompts: Sequence[tuple[str, Prompt]], count: int, seed: int) -> list[Prompt]:
    """`count` of them, in turn from each domain, in a random order."""
    domains: dict[str, list[Prompt]] = {}
    for domain, prompt in prompts:
        domains.setdefault(domain, []).append(prompt)
    for domain in sorted(domains):
        random.Random(f"{seed} {domain}").shuffle(domains[domain])
    chosen: list[Prompt] = []
    while len(chosen) < count and any(domains.values()):
        chosen.extend(waiting.pop() for waiting in domains.values() if waiting)
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def train_drafter(family: Family, name: str, prepared: Prepared, paths: Paths, machine: Machine) -> None:
    """From the target's answers to a folder in the method's published layout."""
    member, folder = family.members[name], paths.family / name
    target = FrozenTarget.load(paths.target, machine.device)
    text = prepared.stage(len(family.stages) - 1)
    stream = PackedStream([*([text] if member.training.text else []), paths.answers(False)], member.training.batch_tokens)
    stream.thin(member.training.tokens)
    held_out = some(PackedStream([paths.answers(True)], member.training.batch_tokens))
    torch.manual_seed(family.seed)
    trainee, write_to = trainee_of(member, target, prepared.tokenizer, paths)
    training = member.training
    if member.method == "mlp_speculator":
        first = replace(training, tokens=int(GROUND_TRUTH_SHARE * training.tokens))
        run_of(trainee, PackedStream([text], training.batch_tokens), first, paths.run(f"{name}_text"), machine, held_out)
        training = replace(training, tokens=training.tokens - first.tokens)
    run = run_of(trainee, stream, training, paths.run(name), machine, held_out)
    write_to(folder)
    leave_facts(run, folder)


def trainee_of(
    member: Member, target: FrozenTarget, tokenizer: PreTrainedTokenizerFast, paths: Paths
) -> tuple[Trainee, Callable[[Path], None]]:
    """What is trained, and how it is written to a folder."""
    settings = dict(member.settings)
    if member.method == "draft_model":
        model = Shape(**settings.pop("shape")).build(target.config.vocab_size)
        return DraftTrainee(model, target, **settings), lambda folder: write_model(model, tokenizer, folder)
    if member.method == "pard":
        settings["draft"] = str(paths.family / "draft_model")
    counts = torch.from_numpy(learned_counts(paths.answers(False), target.config.vocab_size))
    head = make_head(target, settings_of(member.method, None, settings), counts)

    def export(folder: Path) -> None:
        head.export(folder)
        if member.method == "pard":  # is a model by itself
            tokenizer.save_pretrained(folder)

    return head, export


def run_of(trainee: Trainee, stream: PackedStream, training: Training, work: Path, machine: Machine, held_out: Sequence[Packed]) -> Run:
    """Train to the end. Raises KeyboardInterrupt, with everything saved, when asked to stop."""
    workers = machine.workers(training.accumulate)
    torch.set_num_threads(max(1, machine.cores // workers))
    plan = training.plan(mean_tokens(stream), half=machine.half, device=machine.device, workers=workers)
    run = Run(trainee, stream, plan, work, held_out)
    say(f"{work.name}: {sum(p.numel() for p in trainee.parameters()):,} parameters, {training.tokens:,} tokens, on {machine.device}")
    if not run.train(show):
        raise KeyboardInterrupt
    return run


def some(stream: PackedStream) -> list[Packed]:
    return [stream[number] for number in range(min(HELD_OUT_BATCHES, len(stream)))]


def leave_facts(run: Run, folder: Path) -> None:
    """facts.json for the card, and the curves."""
    progress = run.progress
    machine = f"{run.plan.device.type}, {platform.processor() or platform.machine()}, {run.plan.workers} threads"
    if run.plan.device.type == "cuda":
        machine = torch.cuda.get_device_name(run.plan.device)
    facts = {"tokens": progress.tokens, "seconds": round(progress.seconds), "machine": machine}
    (folder / "facts.json").write_text(json.dumps(facts) + "\n")
    shutil.copyfile(run.work / "curves.png", folder / "curves.png")


def publish(family: Path, out: Path) -> None:
    """Copy every file to its place; a reader sees the old file or the new one."""
    for source in sorted(path for path in family.rglob("*") if path.is_file()):
        destination = out / source.relative_to(family)
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = destination.with_name(destination.name + ".partial")
        if source.name == "tokenizer.json":  # is written with a line for each token: more than half of it is spaces
            table = json.loads(source.read_text(encoding="utf-8"))
            partial.write_text(json.dumps(table, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
        else:
            shutil.copyfile(source, partial)
        partial.replace(destination)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
