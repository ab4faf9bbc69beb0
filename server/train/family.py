"""`foretoken train family`: the embedded target and all of its drafters, by the recipe in one file, from corpora to folders.

Joins what only reads text (proposers/training) with the engine that writes it. Each part is a run of its own in the work folder: a
part that is finished is not trained again, one that was stopped goes on where it was.
"""

import filecmp
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from transformers import PreTrainedTokenizerFast

from ...proposers.training.draft import DraftTrainee
from ...proposers.training.family import COUNTED, RECIPE, Family, Member, Prepared, Refinement, hold_out, prepare
from ...proposers.training.frozen import FrozenTarget
from ...proposers.training.loop import Trainee
from ...proposers.training.model_card import REFINED, write_card
from ...proposers.training.ngram_counts import CountLimits
from ...proposers.training.packing import PackedStream
from ...proposers.training.reading import DataError
from ...proposers.training.refinement import RefinementTrainee
from ...proposers.training.target import Shape, TargetTrainee, write_model
from .asking import answer, answer_for_refinement
from .drafter_data import learned_counts
from .head import make_head, settings_of
from .ngram_cache import make_ngram_cache
from .options import Parser
from .parts import Paths, leave_facts, processor, run_of
from .prompts import write_prompts
from .run import Machine, say, some

PROMPTS = "prompts.jsonl.gz"
OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GROUND_TRUTH_SHARE = 0.4             # of an MLP speculator's tokens: its first stage reads the target's own training text

EXAMPLES = """\
examples:
  foretoken train fetch-data --data corpora
  foretoken train family --data corpora --work family-work --out family
  foretoken train family --data corpora --work family-work --out family --only target,eagle3
"""


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
    drafters = [name for name in chosen if name != "target"]
    if (drafters or family.refinement) and not (paths.work / "prompts_held_out.jsonl").exists():
        say("writing the prompts")
        hold_out(family, paths.data, prepared)
    if "target" in chosen and not (paths.target / "model.safetensors").exists():
        train_target(family, prepared, paths, machine)
    if drafters:
        for held_out in (False, True):
            answer(family, prepared, paths, held_out)
    for name in drafters:
        if not (paths.family / name / "model.safetensors").exists():
            if family.members[name].method == COUNTED:
                count_drafter(family, name, paths)
            else:
                train_drafter(family, name, prepared, paths, machine)
    measured = paths.evaluation.exists()
    write_card(paths.family, family, json.loads(paths.evaluation.read_text(encoding="utf-8")) if measured else None, paths.work / "runs")
    if (paths.work / "prompts_held_out.jsonl").exists():
        write_prompts(paths.family / PROMPTS, prepared.prompts(True), family.seed)
    publish(paths.family, paths.out)
    say(f"the family is in {paths.out}" + ("" if measured else f"; measure it, then give this command again for a card with the figures: "
        f"foretoken train evaluate --models {paths.out} --prompts {paths.work / 'prompts_held_out.jsonl'} --out {paths.evaluation.parent}"))


def train_target(family: Family, prepared: Prepared, paths: Paths, machine: Machine) -> None:
    """From the stages' text; then, if the recipe says so, refined on its own answers."""
    refinement = family.refinement
    folder = paths.target if refinement is None else paths.unrefined
    if not (folder / "model.safetensors").exists():
        stream = PackedStream([prepared.stage(number) for number in range(len(family.stages))], family.target.batch_tokens)
        torch.manual_seed(family.seed)
        model = family.shape.build(family.vocab_size)
        run = run_of(TargetTrainee(model, family.read_weight), stream, family.target, paths.run("target"), machine, [])
        write_model(model, prepared.tokenizer, folder)
        leave_facts(run, folder)
    if refinement is not None:
        refine_target(family, refinement, prepared, paths, machine)


def refine_target(family: Family, refinement: Refinement, prepared: Prepared, paths: Paths, machine: Machine) -> None:
    """What the target sometimes does right it learns to do always, and to say nothing over and over."""
    packed = answer_for_refinement(family, refinement, prepared, paths)
    model = family.shape.build(family.vocab_size)
    load_model(model, paths.unrefined / "model.safetensors", strict=False)       # the head is the embedding, and not in the file
    stream = PackedStream([packed], refinement.training.batch_tokens)
    run = run_of(RefinementTrainee(model), stream, refinement.training, paths.run("refinement"), machine, [])
    write_model(model, prepared.tokenizer, paths.target)
    for name in ("facts.json", "curves.png"):
        shutil.copyfile(paths.unrefined / name, paths.target / name)
    leave_facts(run, paths.target, REFINED)


def train_drafter(family: Family, name: str, prepared: Prepared, paths: Paths, machine: Machine) -> None:
    """From the target's answers to a folder in the method's published layout."""
    member, folder = family.members[name], paths.family / name
    training = member.training
    assert training is not None
    target = FrozenTarget.load(paths.target, machine.device)
    text = prepared.stage(len(family.stages) - 1)
    stream = PackedStream([*([text] if training.text else []), paths.answers(False)], training.batch_tokens)
    stream.thin(training.tokens)
    held_out = some(PackedStream([paths.answers(True)], training.batch_tokens))
    torch.manual_seed(family.seed)
    trainee, write_to = trainee_of(member, target, prepared.tokenizer, paths)
    if member.method == "mlp_speculator":
        first = replace(training, tokens=int(GROUND_TRUTH_SHARE * training.tokens))
        run_of(trainee, PackedStream([text], training.batch_tokens), first, paths.run(f"{name}_text"), machine, held_out)
        training = replace(training, tokens=training.tokens - first.tokens)
    run = run_of(trainee, stream, training, paths.run(name), machine, held_out)
    write_to(folder)
    leave_facts(run, folder)


def count_drafter(family: Family, name: str, paths: Paths) -> None:
    """From the target's answers to a folder with what follows runs of their tokens."""
    folder = paths.family / name
    made = make_ngram_cache(paths.answers(False), CountLimits(**family.members[name].settings), family.vocab_size, folder)
    say(f"{name}: {made.runs:,} runs, from {made.tokens:,} tokens of answers")
    facts: dict[str, Any] = {"tokens": made.tokens, "seconds": round(made.seconds), "machine": f"cpu, {processor()}, 1 thread"}
    if made.check:
        facts |= {"held_out_right": round(made.check.share_right, 4), "held_out_expected": round(made.check.share_expected, 4)}
        for line in made.check.lines():
            say(line)
    (folder / "facts.json").write_text(json.dumps(facts) + "\n")


def trainee_of(
    member: Member, target: FrozenTarget, tokenizer: PreTrainedTokenizerFast, paths: Paths
) -> tuple[Trainee, Callable[[Path], None]]:
    """What is trained, and how it is written to a folder."""
    settings = dict(member.settings)
    if member.method == "draft_model":
        model = Shape(**settings.pop("shape")).build(target.config.vocab_size)
        return DraftTrainee(model, target, **settings), lambda folder: write_model(model, tokenizer, folder)
    if member.method == "pard":
        settings["draft"] = paths.family / "draft_model"
        if "shape" in settings:  # not that draft, but a smaller one, which begins fresh
            settings["draft"] = paths.run("pard_start")
            write_model(Shape(**settings.pop("shape")).build(target.config.vocab_size), tokenizer, settings["draft"])
    counts = torch.from_numpy(learned_counts(paths.answers(False), target.config.vocab_size))
    head = make_head(target, settings_of(member.method, None, settings), counts)

    def export(folder: Path) -> None:
        head.export(folder)
        if member.method == "pard":  # is a model by itself
            tokenizer.save_pretrained(folder)

    return head, export


def publish(family: Path, out: Path) -> None:
    """Copy every file to its place; a reader sees the old file or the new one. Drafters that have the target's tokenizer link to it."""
    for source in sorted(path for path in family.rglob("*") if path.is_file()):
        destination = out / source.relative_to(family)
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = destination.with_name(destination.name + ".partial")
        shared = family / "target" / source.name
        is_shared = source.name in OF_TOKENIZER and source != shared and shared.is_file()
        if is_shared and filecmp.cmp(source, shared, shallow=False):
            partial.unlink(missing_ok=True)
            partial.symlink_to(Path("..", "target", source.name))
        elif source.name == "tokenizer.json":
            partial.write_text(_brief(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
        else:
            shutil.copyfile(source, partial)
        partial.replace(destination)


def _brief(table: dict[str, Any]) -> str:
    """A tokenizer is written with a line for each token and a list for each merge: more than half of it is spaces and quotes."""
    merges: list[Any] = table["model"].get("merges", [])
    if not any(" " in part for merge in merges for part in merge):  # tokens of bytes have none: then a pair may be one string
        table["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return json.dumps(table, ensure_ascii=False, separators=(",", ":"))
