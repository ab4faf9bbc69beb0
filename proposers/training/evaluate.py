"""How good an exported target and draft are: held-out loss of each, and how many drafted tokens greedy decoding keeps.

    python -m foretoken.proposers.training.evaluate --models engine/demo_model --work WORK
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from .mixture import TokenIds, load_ids

SEQUENCE = 512


@dataclass(frozen=True)
class Quality:
    """Held-out results. Losses are nats per token."""

    target_loss: dict[str, float]    # by group of the mixture
    draft_loss: dict[str, float]
    agreement: dict[str, float]      # share of positions where both models find the same token most likely
    accepted_length: dict[int, float]    # by k: mean accepted length, greedy, the target's own token included


@torch.inference_mode()
def evaluate(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    held_out: Mapping[str, TokenIds],
    prompts: Sequence[Sequence[int]],
    tokens_per_group: int = 8_192,
    new_tokens: int = 48,
) -> Quality:
    """Measure on the first `tokens_per_group` tokens of each group and on greedy answers to `prompts`."""
    losses: tuple[dict[str, float], dict[str, float]] = ({}, {})
    agreement: dict[str, float] = {}
    for group, ids in held_out.items():
        window = torch.from_numpy(ids[:tokens_per_group + 1].astype("int64"))
        parts = [part for part in window.split(SEQUENCE + 1) if len(part) > 1]
        if not parts:
            continue
        results = torch.stack([_score(target, draft, part) for part in parts]).sum(0)    # [target, draft, same, count]
        target_loss, draft_loss, same = (results[:3] / results[3]).tolist()
        losses[0][group], losses[1][group], agreement[group] = target_loss, draft_loss, same
    matches = [greedy_matches(target, draft, prompt, new_tokens) for prompt in prompts]
    accepted = {k: mean_accepted_length(matches, k) for k in (1, 3, 5)} if matches else {}
    return Quality(*losses, agreement, accepted)


def _score(target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: Tensor) -> Tensor:
    logits = [model(input_ids=ids[None, :-1]).logits[0].float() for model in (target, draft)]
    losses = [torch.nn.functional.cross_entropy(rows, ids[1:], reduction="sum") for rows in logits]
    same = (logits[0].argmax(-1) == logits[1].argmax(-1)).sum()
    return torch.stack([*losses, same, torch.tensor(len(ids) - 1)]).double()


@torch.inference_mode()
def greedy_matches(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: Sequence[int], new_tokens: int
) -> list[bool]:
    """For each token of the target's greedy answer: would the draft, given the same text before it, have said it?

    That is all acceptance needs. A greedy draft is kept up to its first miss, and up to there its own tokens are the
    target's.
    """
    answer = greedy_answer(target, prompt, new_tokens)
    text = torch.tensor([[*prompt, *answer]])
    guesses = draft(input_ids=text[:, :-1]).logits[0, len(prompt) - 1:].argmax(-1)
    return (guesses == text[0, len(prompt):]).tolist()


@torch.inference_mode()
def greedy_answer(model: LlamaForCausalLM, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """At most `new_tokens` most likely tokens, up to and with the first that ends the text."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    answer: list[int] = []
    cache, new = None, list(prompt)
    while len(answer) < new_tokens:
        output = model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache, new = output.past_key_values, [int(output.logits[0, -1].argmax())]
        answer += new
        if isinstance(ends, list) and new[0] in ends:
            break
    return answer


def mean_accepted_length(answers: Sequence[Sequence[bool]], k: int) -> float:
    """Tokens committed per target pass with drafts of k tokens. [1, 1, 0, 1, 1], k = 3 -> 3 tokens, then 2 -> 2.5."""
    tokens = passes = 0
    for matches in answers:
        position = 0
        while position < len(matches):
            kept = 0
            while kept < k and position + kept < len(matches) and matches[position + kept]:
                kept += 1
            committed = min(kept + 1, len(matches) - position)
            position, tokens, passes = position + committed, tokens + committed, passes + 1
    return tokens / max(1, passes)


def spread(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """About `count` prompts, evenly over all of them, so that every source is asked."""
    return list(prompts[::max(1, len(prompts) // count)][:count])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--work", type=Path, required=True, help="work folder of the training run: held-out data")
    parser.add_argument("--prompts", type=int, default=24)
    args = parser.parse_args(argv)
    index = json.loads((args.work / "data.json").read_text())
    held_out = {group: load_ids(args.work / f"held_out_{group}.bin") for group in index["held_out"]}
    target, draft = (
        LlamaForCausalLM.from_pretrained(args.models / name, dtype=torch.float32) for name in ("target", "draft")
    )
    quality = evaluate(target, draft, held_out, spread(index["prompts"], args.prompts))
    print(json.dumps(vars(quality), indent=2))


if __name__ == "__main__":
    main()
