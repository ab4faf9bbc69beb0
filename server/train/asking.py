"""What a family's target is asked through the engine, and what of its answers its drafters, and it itself, learn from.

Drafters learn from all answers, as they came; the target is refined on the good ones. Packed files are made once.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from ...proposers.training.encoding import Prompt, encode_prompt
from ...proposers.training.family import Family, Prepared, Refinement
from ...proposers.training.packing import Document, write
from ...proposers.training.refine import Candidate, chosen, unlearned
from .generating import Answer, Generation, documents, generate
from .parts import Paths
from .run import say

Asked = tuple[Prompt, list[int]]     # and its tokens


def answer(family: Family, prepared: Prepared, paths: Paths, held_out: bool) -> None:
    """Have the target answer prompts of its chats, and pack the answers. Every domain has the same share of them."""
    packed = paths.answers(held_out)
    if packed.with_suffix(".bounds").exists():
        return
    count = family.answers.held_out_prompts if held_out else family.answers.prompts
    asked = fitting(choose(prepared.prompts(held_out), count, family.seed), prepared.tokenizer, family.answers.prompt_tokens)
    say(f"the target answers {len(asked):,} {'held-out ' if held_out else ''}prompts")
    settings = Generation(family.answers.answer_tokens, family.seed)
    answers = generate(str(paths.target), [ids for _, ids in asked], packed.with_suffix(".jsonl"), settings)
    tokens = write(packed, documents(answers), family.vocab_size)
    say(f"packed {tokens:,} tokens")


def answer_for_refinement(family: Family, refinement: Refinement, prepared: Prepared, paths: Paths) -> Path:
    """Have the unrefined target answer; pack its good answers and its circles in a random order. Returns the packed file."""
    packed = paths.work / "refinement"
    if packed.with_suffix(".bounds").exists():
        return packed
    prompts, tokenizer = prepared.prompts(False), prepared.tokenizer
    wanted = [(domain, prompt) for domain, prompt in prompts if domain in refinement.domains]
    others = [(domain, prompt) for domain, prompt in prompts if domain not in refinement.domains]
    sampled = Generation(refinement.answer_tokens, family.seed, temperatures=refinement.temperatures)
    greedy = Generation(refinement.answer_tokens, family.seed, temperatures=(0.0,))
    good: list[Answer] = []
    circles: list[Document] = []
    for name, some, count, samples, settings in (
        ("samples", wanted, refinement.prompts, refinement.samples, sampled), ("others", others, refinement.other_prompts, 1, greedy),
    ):
        asked = fitting(choose(some, count, family.seed), tokenizer, refinement.prompt_tokens)
        say(f"the unrefined target gives {samples} answers to each of {len(asked):,} prompts" if samples > 1 else
            f"the unrefined target answers {len(asked):,} prompts of other domains")
        often = [one for one in asked for _ in range(samples)]
        path = packed.with_name(f"{packed.name}_{name}.jsonl")
        answers = generate(str(paths.unrefined), [ids for _, ids in often], path, settings)
        kept = [answers[number] for number in good_ones(often, answers, tokenizer, refinement.kept)]
        say(f"{len(kept):,} of {len(answers):,} are good")
        good.extend(kept)
        circles.extend(found for one in answers if (found := unlearned(one.prompt_token_ids, one.token_ids)))
    chance = random.Random(family.seed)
    chance.shuffle(circles)
    texts = [*documents(good), *circles[:round(refinement.circles * len(good))]]
    chance.shuffle(texts)
    tokens = write(packed, texts, family.vocab_size)
    say(f"packed {tokens:,} tokens")
    return packed


def good_ones(asked: Sequence[Asked], answers: Sequence[Answer], tokenizer: PreTrainedTokenizerFast, most: int) -> Iterator[int]:
    """Numbers of the answers that a refinement keeps, `most` different ones for each prompt."""
    bar = tqdm(zip(asked, answers, strict=True), desc="checking", total=len(answers), unit=" answers", leave=False, disable=None)
    return chosen((_candidate(prompt, found, tokenizer) for (prompt, _), found in bar), most)


def _candidate(prompt: Prompt, found: Answer, tokenizer: PreTrainedTokenizerFast) -> Candidate:
    ended = found.token_ids[-1:] == [tokenizer.eos_token_id]
    text = str(tokenizer.decode(found.token_ids[:-1] if ended else found.token_ids))
    return Candidate(prompt, found.prompt_token_ids, found.token_ids, text, ended)


def choose(prompts: Sequence[tuple[str, Prompt]], count: int, seed: int) -> list[Prompt]:
    """`count` of them, in turn from each domain, in a random order."""
    domains: dict[str, list[Prompt]] = {}
    for domain, prompt in prompts:
        domains.setdefault(domain, []).append(prompt)
    for domain in sorted(domains):
        random.Random(f"{seed} {domain}").shuffle(domains[domain])
    dealt: list[Prompt] = []
    while len(dealt) < count and any(domains.values()):
        dealt.extend(waiting.pop() for waiting in domains.values() if waiting)
    random.Random(seed).shuffle(dealt)
    return dealt[:count]


def fitting(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast, most: int) -> list[Asked]:
    """Those of at most `most` tokens, and their tokens."""
    bar = tqdm(prompts, desc="prompts", unit=" prompts", leave=False, disable=None)
    asked = [(prompt, encode_prompt(prompt, tokenizer)) for prompt in bar]
    return [(prompt, ids) for prompt, ids in asked if len(ids) <= most]
