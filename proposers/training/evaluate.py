"""How many drafted tokens greedy decoding keeps, told from one pass over a finished answer. Loads nothing and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM


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
