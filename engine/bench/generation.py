"""The engine around the network: whole generations through `LLM.generate`, measured as a script would see them."""

from collections.abc import Callable
from functools import partial

import torch

from ...kernels import limits
from ..llm import LLM
from ..request import SamplingParams
from .checkpoints import Model
from .interleaved import Series, take_turns, timed
from .measurement import GENERATE, Announce, Effort, Measurement, Subject
from .network import BLOCK, READ_PASSES
from .transformers_peer import TransformersPeer

FIRST_ID = 8  # below are the tokenizer's markers


class Prompts:
    """Random token ids, different ones at every call."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(0)

    def fresh(self, rows: int, tokens: int) -> list[list[int]]:
        return torch.randint(FIRST_ID, self._vocab_size, (rows, tokens), generator=self._generator).tolist()

    def around(self, context: int, new_tokens: int, rows: int = 1) -> list[list[int]]:
        """Prompts whose `new_tokens` further tokens lie around `context`.

        One more than whole blocks: asked a second time, the prefix cache knows all but the last token, and every step is a decode step.
        """
        return self.fresh(rows, max((context - new_tokens // 2) // BLOCK, 1) * BLOCK + 1)


class Generator:
    """An `LLM` and the calls that are timed."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.prompts = Prompts(len(llm.get_tokenizer()))

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        return timed(lambda: self.generate(prompts, new_tokens))

    def generate(self, prompts: list[list[int]], new_tokens: int, speculation: str = "off") -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, speculation={"method": speculation})
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert all(len(row) == new_tokens for row in tokens), "a generation ended early"
        return tokens


def measure_generation(subject: Subject, num_bytes: int, effort: Effort, announce: Announce) -> list[Measurement]:
    """Decoding, batches and prompts. num_bytes: of weights that one token reads, the limit's measure. Raises ConfigError."""
    with LLM(subject.model.folder, {"method": "off"}, **subject.options) as llm:
        generator = Generator(llm)
        prompts, new = generator.prompts, effort.decode_tokens
        found: list[Measurement] = []

        announce("decode through LLM.generate")
        with limits.ReadBuffer(num_bytes) as buffer:
            cases: dict[int, Callable[[], float]] = {0: lambda: num_bytes / buffer.read_rate(subject.threads, READ_PASSES)}
            cases |= {n: partial(generator.seconds, prompts.around(n, new), new) for n in effort.decode_contexts}
            seconds = take_turns(cases, effort.rounds)
        limit = seconds.pop(0).rate()
        found += [subject.measurement(GENERATE, "decode", n, "tokens/s", s.rate(new), limit, "limit") for n, s in seconds.items()]

        announce("rows through LLM.generate")
        made = {rows: prompts.around(effort.rows_context, new, rows) for rows in effort.rows}
        seconds = take_turns({rows: partial(generator.seconds, made[rows], new) for rows in effort.rows}, effort.rounds)
        rates = {rows: s.rate(rows * new) for rows, s in seconds.items()}
        found += [subject.measurement(GENERATE, "rows", n, "tokens/s", rate, rates[1], "one row") for n, rate in rates.items()]

        announce("prefill through LLM.generate")
        tokens = effort.prompt_tokens
        seconds = take_turns({tokens: lambda: generator.seconds(prompts.fresh(1, tokens), 1)}, effort.rounds)
        found.append(subject.measurement(GENERATE, "prefill", tokens, "tokens/s", seconds[tokens].rate(tokens)))
        return found


def measure_transformers(subject: Subject, effort: Effort, announce: Announce) -> list[Measurement]:
    """Whole requests of one stream, through us and through transformers' own `generate`, in turn."""
    announce("transformers generate")
    dtype, threads = str(subject.options["dtype"]), subject.threads
    with (
        LLM(subject.model.folder, {"method": "off"}, **subject.options) as llm,
        TransformersPeer(subject.model.folder, dtype, threads) as peer,
    ):
        generator, new = Generator(llm), effort.decode_tokens
        fresh = partial(generator.prompts.fresh, 1, effort.load_prompt_tokens)
        cases = {
            GENERATE: lambda: generator.seconds(fresh(), new),
            "transformers": lambda: timed(lambda: peer.generate(fresh(), new, ignore_eos=True)),
        }
        rates = {name: seconds.rate(new) for name, seconds in take_turns(cases, effort.rounds).items()}
    theirs = rates["transformers"]
    return [subject.measurement(name, "one stream", 1, "tokens/s", rate, theirs, "transformers") for name, rate in rates.items()]


def measure_speculation(target: Model, draft: Model, k: int, threads: int, effort: Effort, announce: Announce) -> list[Measurement]:
    """Greedy generations of one stream with a draft model and without, in turn, and the share of them that are the same."""
    announce("draft model on and off")
    subject = Subject(target, "bf16", threads)
    config = {"method": "draft_model", "model": str(draft.folder), "num_speculative_tokens": k, "adaptive": False}
    with LLM(target.folder, config, **subject.options) as llm:
        generator, new = Generator(llm), effort.decode_tokens
        outputs: dict[str, list[list[int]]] = {"off": [], "draft_model": []}
        drafts = accepted = 0

        def run(method: str) -> float:
            nonlocal drafts, accepted
            # The same prompts for both: one for each time that the method has had its turn. They are in both caches by then.
            turn = len(outputs[method])
            prompts = Prompts(len(llm.get_tokenizer())).fresh(turn + 1, effort.load_prompt_tokens // BLOCK * BLOCK + 1)[-1:]
            if all(len(generated) <= turn for generated in outputs.values()):
                generator.generate(prompts, 2, "draft_model")
            tokens: list[list[int]] = []
            before = llm.stats()
            seconds = timed(lambda: tokens.extend(generator.generate(prompts, new, method)))
            after = llm.stats()
            drafts += after.num_drafts - before.num_drafts
            accepted += after.num_accepted_tokens - before.num_accepted_tokens
            outputs[method] += tokens
            return seconds

        seconds = take_turns({m: partial(run, m) for m in outputs}, effort.rounds * effort.drafted_prompts)
        rates = {method: s.rate(new) for method, s in seconds.items()}
    same = Series((sum(a == b for a, b in zip(*outputs.values(), strict=True)) / len(outputs["off"]),))
    length = Series((1 + accepted / max(drafts, 1),))
    return [
        *(subject.measurement(GENERATE, f"draft {m}", k, "tokens/s", rate, rates["off"], "off") for m, rate in rates.items()),
        subject.measurement(GENERATE, "draft length", k, "tokens/pass", length),
        subject.measurement(GENERATE, "draft identical", k, "share", same),
    ]
