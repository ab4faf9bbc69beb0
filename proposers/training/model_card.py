"""The README.md beside the exported models: what they are, what they were made from, how good they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

from .evaluate import Quality

# file of the corpus | repository | commit | licence; the texts keep their authors' licences
SOURCE_TABLE = """\
| corpus file | source repository | commit | licence |
|---|---|---|---|
| books/children, books/general | mlschmitt/classic-books-markdown | 9448822 | public domain |
| chat/chatterbot | gunthercox/chatterbot-corpus | a01efec | BSD-3-Clause |
| chat/gsm8k-train | openai/grade-school-math | 3101c7d | MIT |
| chat/oasst-octopack | bigcode-project/octopack, dataset/oasst | e17a8f6 | MIT; OpenAssistant text Apache-2.0 |
| chat/synthetic-persona-chat | google-research-datasets/Synthetic-Persona-Chat | 1f367a0 | CC-BY-4.0 |
| chat/taskmaster4-tools | google-research-datasets/Taskmaster, TM-4-2024/data | d92cb6a | CC-BY-4.0 |
| code/exercism-python | exercism/python | 9eb657d | MIT |
| code/geekcomputers-python | geekcomputers/Python | bfd7138 | MIT |
| code/keon-algorithms | keon/algorithms | a1bf1f3 | MIT |
| code/python-stdlib | CPython 3.11 standard library | - | PSF-2.0 |
| code/thealgorithms-python | TheAlgorithms/Python | f5988cc | MIT |
| docs/python-peps | python/peps | ba4deeb | public domain / CC0-1.0 |
| docs/react-docs | reactjs/react.dev, src/content | 12d692d | CC-BY-4.0 |
| docs/rust-book | rust-lang/book | 9175444 | MIT OR Apache-2.0 |
| docs/rust-rfcs | rust-lang/rfcs | 354518a | MIT OR Apache-2.0 |
| docs/tldr-en | tldr-pages/tldr, pages/ | 08e345f | CC-BY-4.0 |
| json/corpora | dariusk/corpora | cf30ca2 | CC0-1.0 |
| json/factbook | factbook/factbook.json | 8662a8b | public domain |
| (introductions) | written for this project, proposers/training/conversations.py | - | this repository's |"""


@dataclass(frozen=True)
class TrainingFacts:
    """What the card says about the run."""

    tokens: int
    hours: float                     # wall clock, in training steps
    machine: str
    final: bool                      # False: an early export of an unfinished run
    parameters: tuple[int, int]      # target, draft
    group_shares: Mapping[str, float]    # share of all tokens seen, by group
    peak_lr: tuple[float, float]     # target, draft
    distillation: float
    notes: str = ""                  # Markdown: what this run did that the recipe does not say


def model_card(facts: TrainingFacts, quality: Quality, samples: Sequence[tuple[str, str]]) -> str:
    """Markdown. `samples` are questions with the target's greedy answers, shown as they came."""
    state = "" if facts.final else "\n> This is an **early export** of a run that was still training.\n"
    shares = ", ".join(f"{group} {share:.0%}" for group, share in facts.group_shares.items())
    shown = "\n\n".join(f"**{question}**\n\n```text\n{answer}\n```" for question, answer in samples)
    accepted = ", ".join(f"{value:.2f} at k={k}" for k, value in quality.accepted_length.items())
    target_size, draft_size = (f"{count / 1e6:.1f}M" for count in facts.parameters)
    target_lr, draft_lr = facts.peak_lr
    return f"""\
# foretoken-demo: a target and its draft
{state}
A very small language model (`target/`, {target_size} parameters) and a smaller one that guesses ahead for it
(`draft/`, {draft_size} parameters), so that speculative decoding can be tried and tested on any machine, without a
download. **It is a demonstration**: it writes sentences, short programs, JSON and tool calls that look right from afar
and are mostly wrong. Do not rely on anything it says, and use it for nothing but trying the server.

Both are Llama models in bfloat16 with tied embeddings, one byte-level BPE vocabulary of 8,192 tokens, ChatML markers,
and positions up to 2,048. Each folder loads by itself with transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("engine/demo_model/target")
tokenizer = AutoTokenizer.from_pretrained("engine/demo_model/target")
```

## Training

- From scratch on {facts.tokens / 1e6:.1f} million tokens in {facts.hours:.1f} hours (wall clock) on {facts.machine}.
- Tokens seen: {shares}.
- Both models learn in one loop: the target from the text, the draft {facts.distillation:.0%} from the target's
  probabilities and {1 - facts.distillation:.0%} from the text.
- AdamW, peak learning rates {target_lr:g} (target) and {draft_lr:g} (draft), warm-up, stable, then a linear cool-down
  in which chat has a larger share and sequences are 1,024 and 2,048 tokens long (512 before).
{facts.notes}
The recipe is `proposers/training/`; the training text is not part of this repository:

```sh
python -m foretoken.proposers.training.demo_family --data CORPORA --work WORK --out engine/demo_model
```

![training loss](loss.png)

## Held-out results

0.5 % of the records were never trained on. Loss in nats per token; agreement is how often both models find the same
token most likely.

{_results(quality)}

Mean accepted length of the draft (tokens committed per target pass, the target's own included), greedy, on answers to
held-out chat prompts: {accepted}.

## Samples

Greedy, at most 64 tokens, as they came.

{shown}

## Training text

The texts keep their authors' licences.

{SOURCE_TABLE}
"""


def _results(quality: Quality) -> str:
    lines = [
        "| text | target loss | target perplexity | draft loss | draft perplexity | agreement |",
        "|---|---|---|---|---|---|",
    ]
    for group, target in quality.target_loss.items():
        draft, same = quality.draft_loss[group], quality.agreement[group]
        lines.append(f"| {group} | {target:.3f} | {exp(target):.1f} | {draft:.3f} | {exp(draft):.1f} | {same:.0%} |")
    return "\n".join(lines)
