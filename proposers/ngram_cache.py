"""N-gram cache: short runs of tokens, counted in what the target said before, say what comes next. No network, no target state.

Its table is read once and never changes; suffix decoding and pools are what learn while they serve.
"""

from dataclasses import replace

from ..kernels.ngram_table import NgramTable
from .base import Draft, DraftContext, Feedback, Needs
from .checkpoint import Checkpoint
from .config import NgramCacheConfig
from .loading import LoadedProposer, Resources
from .ngram_cache_checkpoint import read_table

LEAST_CHANCE = 0.05
"""That a guess and all before it are right, by the table: below that no target is slow enough to verify it."""


class NgramCacheProposer:
    """The static lookup cache of llama.cpp, with a chance for every guess and the longest known run first.

    A guess is read behind the longest run of known tokens that the text ends with, the next one behind that guess, and so on, while
    they are likely enough together.
    """

    needs = Needs(hears="nothing")

    def __init__(self, table: NgramTable, num_speculative_tokens: int, name: str = "ngram_cache") -> None:
        self.name = name
        self.max_tokens = num_speculative_tokens
        self.table = table

    def propose(self, context: DraftContext) -> Draft:
        found = [self.table.chain(row.token_ids, min(row.ceiling, self.max_tokens), LEAST_CHANCE) for row in context.rows]
        draft = Draft.chains([token_ids for token_ids, _ in found])
        return replace(draft, confidence=[chance for _, chances in found for chance in chances])

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_id: str) -> None:
        """Nothing is kept of requests."""

    def check(self) -> None:
        """What cannot change cannot become inconsistent."""

    def close(self) -> None:
        """Nothing outlives the process."""


def load(config: NgramCacheConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if the folder holds no n-gram cache, or one of another vocabulary."""
    checkpoint = Checkpoint(resources.find_folder(config.model, config.revision))
    table = read_table(checkpoint, resources.target.vocab_size)
    described = (f"{table.num_runs:,} runs of up to {table.max_n} tokens", *checkpoint.leftovers())
    return LoadedProposer(
        "ngram_cache",
        lambda opening: NgramCacheProposer(table, config.num_speculative_tokens, opening.name),
        found=described,
        is_learned=True,
    )
