"""What a grammar's masks cost for each token of an output, as a table in Markdown.

`python -m foretoken.engine.bench.grammar_masks` prints it. Two vocabularies: the embedded model's, and one of 151,936 tokens that is
trained here on made-up words, since no model of that size comes with the package. Times are what one thread computes, whatever else
the machine does; nothing else of a step is in them.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..default_speculation import DEMO_DRAFT
from ..grammar import CompiledGrammar
from ..grammar_compiler import GrammarCompiler
from ..grammar_spec import GrammarSpec
from ..plan import PlanRow
from ..request import Request, SamplingParams
from ..sampler import Sampler
from .machine import this_machine

LARGE = 151_936
DRAFT = 4  # guesses of a step
PEOPLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "born": {"type": "string", "format": "date"},
            "tags": {"type": "array", "items": {"enum": ["new", "vip", "blocked"]}, "maxItems": 3},
            "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 80}]},
        },
        "required": ["name", "age", "born", "tags", "note"],
        "additionalProperties": False,
    },
}
TREE = {
    "type": "object",
    "properties": {"value": {"type": "number"}, "left": {"$ref": "#"}, "right": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """A form, and a text that has it."""

    name: str
    spec: GrammarSpec
    text: str


@dataclass(frozen=True)
class Cost:
    """Microseconds of one output token."""

    mean: float
    p99: float


def cases() -> list[Case]:
    dice = Random(0)
    people = [
        {
            "name": _words(dice, 2),
            "age": dice.randrange(100),
            "born": f"19{dice.randrange(60, 99)}-0{dice.randrange(1, 9)}-1{dice.randrange(9)}",
            "tags": dice.sample(["new", "vip", "blocked"], 2),
            "note": dice.choice([None, _words(dice, 6)]),
        }
        for _ in range(6)
    ]
    names = "".join(f"{_words(dice, 1).title()}, {i}\n" for i in range(40))
    sums = 'start: e\ne: t (("+" | "-") t)*\nt: f ("*" f)*\nf: /[0-9]+/ | "(" e ")"'
    return [
        Case("JSON schema of records", GrammarSpec.json_schema(PEOPLE), json.dumps(people)),
        Case("recursive JSON schema", GrammarSpec.json_schema(TREE), json.dumps(_tree(dice, 5))),
        Case("any JSON object", GrammarSpec.json_object(), json.dumps({"people": people, "next": None})),
        Case("regular expression", GrammarSpec.regex(r"([A-Z][a-z]+, [0-9]{1,4}\n)+"), names),
        Case("Lark grammar", GrammarSpec.grammar(sums), "(12+3)*4-" * 30 + "7"),
    ]


def large_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE over words that nobody says; some 20 s."""
    dice = Random(1)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGE, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    marks = ['", "', '": "', '": ', '"}, {"', "\n", '{"', "], ", ".\n\n", "(", ");\n"]
    bar = tqdm(range(60_000), "making text", leave=False, disable=None)
    lines = (_words(dice, 12) + dice.choice(marks) + str(dice.randrange(1000)) for _ in bar)
    bpe.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


def follow(grammar: CompiledGrammar, token_ids: Sequence[int], num_drafted: int, num_right: int) -> Cost:
    """An output that is written in steps of num_right guesses that stand, of num_drafted, and one token of the target's own."""
    known: list[int] = []
    state = grammar.open(known)
    seconds: list[float] = []
    while len(known) < len(token_ids):
        started = time.thread_time()
        state.forced(num_drafted)
        path: list[int] = []
        if num_drafted:
            right = [*token_ids[len(known) : len(known) + num_right]]
            guess = [*right, *token_ids[: num_drafted - len(right)]]  # what follows is wrong, or fits by chance
            path = [guess[node] for node in state.legal(guess, range(-1, len(guess) - 1))]
        for end in range(len(path) + 1):
            state.mask(path[:end])
        passed = time.thread_time() - started
        new = token_ids[len(known) : len(known) + num_right + 1]
        seconds += [passed / len(new)] * len(new)
        known += new
    return _cost(seconds)


def choose(grammar: CompiledGrammar, token_ids: Sequence[int], vocab_size: int, masked: bool) -> Cost:
    """The choice of a greedy token from whole logits, with the mask computed before."""
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0))
    sampler, seconds = Sampler(), list[float]()
    request = Request("r", [1], SamplingParams(temperature=0, logprobs=None if masked else 0), 0.0, len(token_ids) + 1, 0)
    if masked:
        request.grammar = grammar.open(request.token_ids)
    row = PlanRow(request, 0, 1, [], [], [], [], True)
    for token in token_ids:
        if request.grammar is not None:
            request.grammar.mask(())
        started = time.thread_time()
        sampler.choose(logits, [row], [0])
        seconds.append(time.thread_time() - started)
        request.token_ids.append(token)
    return _cost(seconds)


def measure(name: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Rows of the table for one vocabulary."""
    vocab_size, end = len(tokenizer), tokenizer.eos_token_id
    assert isinstance(end, int)
    compiler = GrammarCompiler(tokenizer, vocab_size, [end], deadline_s=60.0)
    compiler.compile(GrammarSpec.choice(["the vocabulary is read on first use"]))
    rows: list[str] = []
    for case in tqdm(cases(), name, leave=False, disable=None):
        token_ids = list(tokenizer.encode(case.text, add_special_tokens=False))
        started = time.perf_counter()  # it happens in another thread
        grammar = compiler.compile(case.spec)
        compiled = time.perf_counter() - started
        follow(grammar, token_ids, 0, 0)  # the lexer's states are found once
        plain, rejected, accepted = (follow(grammar, token_ids, *drafted) for drafted in ((0, 0), (DRAFT, 1), (DRAFT, DRAFT)))
        masked, free = (choose(grammar, token_ids, vocab_size, masked).mean for masked in (True, False))
        rows.append(
            f"| {vocab_size:,} | {case.name} | {len(token_ids)} | {_cell(plain)} | {_cell(rejected)} | {_cell(accepted)} | "
            f"{masked - free:+.0f} | {compiled * 1e3:.0f} |"
        )
    return rows


def main() -> None:
    torch.set_num_threads(1)
    print(this_machine().describe() + "\n")
    guessing = " | ".join(f"{right} of {DRAFT} guesses right" for right in (1, DRAFT))
    print(f"| vocabulary | form | tokens | no guesses | {guessing} | choice under it | compiling, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name, tokenizer in (("embedded", AutoTokenizer.from_pretrained(DEMO_DRAFT)), ("large", large_tokenizer())):
        print("\n".join(measure(name, tokenizer)), flush=True)


def _cost(seconds: Sequence[float]) -> Cost:
    micros = np.array(seconds) * 1e6
    return Cost(float(micros.mean()), float(np.percentile(micros, 99)))


def _cell(cost: Cost) -> str:
    return f"{cost.mean:.0f} ({cost.p99:.0f})"


def _words(dice: Random, count: int) -> str:
    syllables = [start + vowel for start in "b c d gr h l m n p st tr w k sh r".split() for vowel in "a e i o u ea ou ar in".split()]
    return " ".join("".join(dice.choices(syllables, k=dice.randint(1, 4))) for _ in range(count))


def _tree(dice: Random, depth: int) -> dict[str, object]:
    node: dict[str, object] = {"value": round(dice.uniform(-9, 9), 2)}
    return node if depth == 0 else node | {"left": _tree(dice, depth - 1), "right": _tree(dice, depth - 2 if depth > 1 else 0)}


if __name__ == "__main__":
    main()
