"""The README.md of a trained family: what its parts are, what they were made from, and what came out, good and bad.

Everything in it is read from files: the recipe, what each training left behind (facts.json, curves.png, log.csv), evaluation.json and
the weights' sizes. What is missing is left out. Knows no network.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from .curves import read_rows
from .family import Family, Member, Training
from .fetch_data import licence_table
from .ngram_counts import CountLimits

WHAT = {
    "target": "the model that is served",
    "draft_model": "draft model: a smaller model of the same vocabulary, distilled from the target's own answers",
    "eagle": "EAGLE-1: one layer over embedding and last state; embedding and head are the target's",
    "eagle3": "EAGLE-3: one layer over states of three of the target's layers, with a draft vocabulary of its own",
    "medusa": "Medusa: one small head for each position ahead, on the target's own output layer",
    "mlp_speculator": "MLP speculator: a small recurrent network over the last state, weights tied over positions",
    "mtp": "MTP: one layer that predicts the token after next, on the target's embedding and head",
    "pard": "PARD: a draft model that fills mask tokens, all guesses in one pass",
    "dflash": "DFlash: two layers that fill a block of mask tokens over states of several of the target's layers",
    "ngram_cache": "n-gram cache: which token follows each of these short runs of tokens most often in the target's own answers, and how "
    "likely it is; no network",
}
FORMS = {"json": "JSON answers that parse (and fit the schema, where one is given)", "tool call": "tool calls that are well-formed, "
         "name a function on offer and have its required arguments", "python": "Python answers that compile"}
REFINED = "refinement_"              # how the names of the files begin that the target's refinement left
LONGEST_SHOWN = 1200                 # characters of one message in a transcript
K = 5


def write_card(family: Path, recipe: Family, evaluation: Mapping[str, Any] | None, logs: Path | None = None) -> None:
    """README.md in the family's folder, where each member may have facts.json and curves.png beside its weights.

    evaluation: what `foretoken train evaluate` wrote. logs: the trainings' folder, with MEMBER/log.csv.
    """
    members = [name for name in WHAT if (family / name / "model.safetensors").exists()]
    sections = [
        _introduction(), _parts(family, members), _training(family, members, recipe), _held_out(family, members, logs) if logs else "",
        *(_results(evaluation) if evaluation else ()),
        "## Training text\n\nThe texts keep their authors' licences. Dialogues made by rule (JSON from a schema, everyday arithmetic, "
        f"everyday tools) are this repository's own.\n\n{licence_table()}",
    ]
    (family / "README.md").write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")


def _introduction() -> str:
    return """\
# foretoken-demo: a target and its drafters

A very small language model (`target/`) and, for every method of speculative decoding that needs weights, a drafter that was trained
for it, so that each method can be tried and tested on any machine, without a download. **It is a demonstration.** It knows its few
kinds of dialogue and little else; what it says in good form may still be wrong. Do not rely on anything it says.

```sh
foretoken serve --speculative-config '{"method": "eagle3"}'
```

Each folder has the layout in which its method is published, in bfloat16 (`ngram_cache/` one of its own). `target/` and
`draft_model/` load by themselves with transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("engine/demo_model/target")
tokenizer = AutoTokenizer.from_pretrained("engine/demo_model/target")
```"""


def _parts(family: Path, members: Iterable[str]) -> str:
    rows = [(name, *_size(family / name / "model.safetensors")) for name in members]
    lines = [(f"`{name}/`", number, f"{size / 1e6:.2f}", WHAT[name]) for name, number, size in rows]
    table = _table(("folder", "parameters", "MB", "what it is"), lines)
    drafters = sum(size for name, _, size in rows if name != "target")
    return f"## Parts\n\n{table}\n\nAll drafters together: {drafters / 1e6:.1f} MB. One MB is 1,000,000 bytes."


def _size(weights: Path) -> tuple[str, int]:
    """(number of values, or of runs in an n-gram cache; bytes) of a safetensors file."""
    with safe_open(weights, "pt") as tensors:
        values = {name: prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # no mapping
    runs = sum(number for name, number in values.items() if name.startswith("chance."))
    return f"{runs:,} runs" if runs else f"{sum(values.values()):,}", weights.stat().st_size


def _training(family: Path, members: Sequence[str], recipe: Family) -> str:
    """What each part read, where and for how long, as far as its training left facts; the recipe; the curves."""
    how = {"target": _settings(recipe.target)} | {
        name: _settings(member.training) if member.training else _counting(member) for name, member in recipe.members.items()}
    facts = {name: json.loads(path.read_text()) for name in members if (path := family / name / "facts.json").exists()}
    rows = [_row(f"`{name}/`", found, how.get(name, "")) for name, found in facts.items()]
    refined = family / "target" / f"{REFINED}facts.json"
    if recipe.refinement and refined.exists():
        rows.insert(1, _row("`target/`, refined", json.loads(refined.read_text()), _settings(recipe.refinement.training)))
    stages = "; then ".join(
        f"{stage.share:.0%} of them " + ", ".join(f"{domain} {share:.0%}" for domain, share in stage.domains.items())
        for stage in recipe.stages)
    shape = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in asdict(recipe.shape).items())
    drawn = [(name, f"{name}/curves.png") for name in members]
    drawn.insert(1, ("target, refined", f"target/{REFINED}curves.png"))
    curves = "\n".join(f"- [{name}]({path})" for name, path in drawn if (family / path).exists())
    return "\n\n".join(filter(None, (
        "## Training",
        f"The target is a Llama model from scratch ({shape}, {recipe.vocab_size:,} tokens of byte-level BPE, tied embeddings, ChatML "
        f"markers). Its tokens: {stages}. {_refinement(recipe)}The drafters learned from text that the finished target wrote itself.",
        _table(("part", "million tokens read", "minutes", "machine", "settings"), rows) if rows else "",
        f"Curves of the trainings:\n\n{curves}" if curves else "",
        "The recipe is `proposers/training/family.toml`; the training text is not part of this repository:\n\n"
        "```sh\nforetoken train family --data CORPORA --work WORK --out MODELS\n```",
    )))


def _row(part: str, found: Mapping[str, Any], settings: str) -> Sequence[str]:
    return (part, f"{found['tokens'] / 1e6:.2f}", f"{found['seconds'] / 60:.0f}", str(found["machine"]), settings)


def _refinement(recipe: Family) -> str:
    if recipe.refinement is None:
        return ""
    refinement = recipe.refinement
    return (
        f"Then it was refined on its own answers ([rejection sampling](https://arxiv.org/abs/2308.01825) and "
        f"[unlikelihood](https://arxiv.org/abs/1908.04319)): it learned, of {refinement.samples} answers "
        f"to each of {refinement.prompts:,} prompts of {', '.join(refinement.domains)}, at temperatures "
        f"{' and '.join(map(str, refinement.temperatures))}, the well-formed ones, at most {refinement.kept} a prompt, and its greedy "
        f"answers to {refinement.other_prompts:,} prompts of the other domains; it unlearned saying things for the third time on end. "
    )


def _settings(training: Training) -> str:
    optimizer = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in asdict(training.optimizer).items()
                          if isinstance(value, (int, float)))
    return f"{training.accumulate} x {training.batch_tokens:,} tokens a step, {optimizer}"


def _counting(member: Member) -> str:
    limits = CountLimits(**member.settings)
    return f"runs of up to {limits.max_n} tokens that came {limits.min_count} times, the {limits.max_runs:,} that help most"


def _held_out(family: Path, members: Iterable[str], logs: Path) -> str:
    """The last held-out metrics of each log; of what was only counted those of its facts."""
    rows: list[tuple[str, str]] = []
    for name in members:
        last = {key: value for row in read_rows(logs / name / "log.csv") for key, value in row.items() if "held_out_" in key and value}
        if last:
            shown = (f"{key.removeprefix('held_out_').replace('_', ' ')} {float(value):.3f}" for key, value in last.items())
            rows.append((f"`{name}/`", ", ".join(shown)))
        facts = family / name / "facts.json"
        if not last and facts.exists() and "held_out_right" in (found := json.loads(facts.read_text())):
            rows.append((f"`{name}/`", f"accuracy {found['held_out_right']:.3f}, expected by itself {found['held_out_expected']:.3f}"))
    return "## Held-out text\n\nLosses in nats per token; accuracy is the share of tokens guessed right, at each depth alone.\n\n" + _table(
        ("part", "at the end of its training"), rows) if rows else ""


def _results(evaluation: Mapping[str, Any]) -> Iterable[str]:
    """Form, perplexity, accepted lengths, transcripts."""
    domains: Mapping[str, Any] = evaluation["domains"]
    yield (
        "## Results\n\nHeld-out prompts, never trained on, answered greedily, "
        f"at most {evaluation['prompts_per_domain']} a domain and {evaluation['max_tokens']} tokens an answer. "
        f"Measured on {evaluation['machine']}."
    )
    forms = {kind: [0, 0] for kind in FORMS}
    for found in domains.values():
        for kind, (good, total) in found["well_formed"].items():
            forms[kind] = [forms[kind][0] + good, forms[kind][1] + total]
    rows = [(FORMS[kind], f"{good / total:.0%}", f"{good} of {total}") for kind, (good, total) in forms.items() if total]
    if rows:
        yield "### Form of the answers\n\nWhether what they say is true is not checked.\n\n" + _table(("answers", "share", ""), rows)
    if likely := evaluation.get("perplexity"):
        yield (
            "### Perplexity\n\nOf the target, on the answers that the corpus has to these prompts: `exp` of a token's mean loss.\n\n"
            + _table(("", *(row["domain"] for row in likely)), [
                ("perplexity", *(f"{row['perplexity']:.2f}" for row in likely)), ("tokens", *(f"{row['tokens']:,}" for row in likely))])
        )
    ks = sorted({row["k"] for row in evaluation["acceptance"]})
    if ks:
        yield _acceptance(evaluation["acceptance"], K if K in ks else ks[-1])
    yield "### Transcripts\n\nThe first of each domain, as it came.\n\n" + "\n\n".join(
        _transcript(domain, one) for domain, found in domains.items() for one in found["transcripts"][:1])


def _acceptance(rows: Sequence[Mapping[str, Any]], k: int) -> str:
    mine = [row for row in rows if row["k"] == k]
    domains = [*dict.fromkeys(row["domain"] for row in mine if row["domain"] != "all"), "all"]
    lines = []
    for method in dict.fromkeys(row["method"] for row in mine):
        found = {row["domain"]: row for row in mine if row["method"] == method}
        most = found["all"]["most"]
        name = method if most == k else f"{method} (k = {most})"
        lines.append((name, *(f"{found[domain]['mean_accepted_length']:.2f}" for domain in domains), f"{found['all']['mu']:.2f}",
                      f"{found['all']['drafts'] / max(1, found['all']['passes']):.0%}"))
    same, answers = (sum(row[name] for row in rows if row["domain"] == "all") for name in ("same_answers", "answers"))
    return (
        f"### Mean accepted length, greedy, k = {k}\n\nTokens committed per target pass: mu + 1, mu being the accepted guesses. Passes "
        "without a draft count, too; the last column is the share that had one.\n\n"
        + _table(("method", *domains, "mu, all", "drafted"), lines)
        + f"\n\nAt all draft lengths, {same:,} of {answers:,} answers were token for token those without speculation."
    )


def _transcript(domain: str, one: Mapping[str, Any]) -> str:
    """A prompt and its answer, indented, so that nothing in them can be taken for Markdown."""
    said = [(message["role"], _said(message)) for message in one["messages"]]
    tools = ", ".join(tool["function"]["name"] for tool in one["tools"])
    lines = [f"[{role}] {text}" for role, text in ([("tools on offer", tools)] if tools else []) + said]
    lines.append(f"[answer] {one['answer']}{' [cut off]' if one['finish_reason'] == 'length' else ''}")
    fault = f" (not well-formed: {one['fault']})" if one["fault"] else ""
    block = "\n".join(f"    {line}" for line in "\n".join(lines).splitlines())
    return f"**{domain}**{fault}\n\n{block}"


def _said(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    content = [message["content"]] if message.get("content") else []
    text = "\n".join([*content, *(f"{call['name']}({call['arguments']})" for call in calls)])
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} [... {len(text) - LONGEST_SHOWN:,} more characters]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)])
