"""A smaller causal language model guesses ahead of the target (Leviathan et al. 2023; Chen et al. 2023).

Knows what makes a draft model fit a target. The network and its loading are given.
"""

import dataclasses

from ..kernels.layout import Executor
from ..kernels.weights import check_finite, check_tensors, network_program
from .checkpoint import Checkpoint
from .config import DraftModelConfig
from .config_entry import SpeculativeConfigError
from .draft_states import DraftStates
from .drafting import OwnCache
from .guessing import ChainGuesser, Drawing, Network
from .learned import LearnedProposer
from .loading import LoadedProposer, Opening, Resources
from .retokenizing import RetokenizingProposer
from .vocabularies import Intersection, check_vocabularies, read_tokenizer, transplanted


def load(config: DraftModelConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if the draft reads text as other ids than the target, and was not told to."""
    match config.vocabulary:
        case "same":
            draft = resources.load_draft(config)
            check_vocabularies(resources.target.tokenizer, draft.tokenizer, ", or set use_heterogeneous_vocab")
            return _chains(config, resources, draft.executor, draft.executor.vocab_size, ())
        case "intersection":
            return _load_intersection(config, resources)
        case "retokenize":
            return _load_retokenizing(config, resources)


def _chains(
    config: DraftModelConfig, resources: Resources, executor: Executor, num_readable: int, found: tuple[str, ...]
) -> LoadedProposer:
    """num_readable: token ids below it are in the draft's embedding."""

    def open(opening: Opening) -> LearnedProposer:
        drawing = Drawing.asked(config.draft_sample_method, resources.target.vocab_size, opening.return_probs)
        guesser = ChainGuesser(Network(executor, opening.caches[0]), drawing, config.confidence_threshold)
        most = config.num_speculative_tokens
        states = None
        if executor.state_layers:
            assert opening.states is not None, "who allocates states says how many"
            states = DraftStates(opening.states, opening.block_size, most)
        cache = OwnCache(_max_model_len(config, executor), most, num_readable, states=states)
        return LearnedProposer(opening.name, executor.kv_layers, cache, guesser)

    return LoadedProposer("draft_model", open, (executor,), found=found, is_learned=True)


def _load_intersection(config: DraftModelConfig, resources: Resources) -> LoadedProposer:
    """The draft's weights moved into the target's vocabulary; then it is a draft like any other."""
    if config.draft_layers is not None:
        raise SpeculativeConfigError("draft_layers goes with a draft of the target's vocabulary, or with heterogeneous_vocab 'retokenize'")
    target = resources.target
    checkpoint = Checkpoint(resources.find_folder(config.model, config.revision))
    tokens = Intersection.of(target.tokenizer, read_tokenizer(checkpoint.folder), target.vocab_size)
    program = network_program(checkpoint.model_config())
    check_tensors(program, checkpoint.tensors)
    moved, weights = transplanted(program, checkpoint.tensors, tokens)
    check_finite(weights)
    executor = resources.bind(moved, weights, config.quantization)
    found = f"another vocabulary: guesses the {len(tokens.target_ids):,} tokens that both have, of the target's {len(target.tokenizer):,}"
    return _chains(config, resources, executor, target.vocab_size, (found,))


def _load_retokenizing(config: DraftModelConfig, resources: Resources) -> LoadedProposer:
    if config.draft_sample_method == "probabilistic":
        raise SpeculativeConfigError("heterogeneous_vocab 'retokenize' guesses text, greedily: leave draft_sample_method away")
    draft = resources.load_draft(dataclasses.replace(config, vocabulary="same"))
    executor, target = draft.executor, resources.target
    if executor.state_layers:
        raise SpeculativeConfigError(
            "heterogeneous_vocab 'retokenize' reads ends of the text anew, which a draft with recurrent layers cannot: choose another draft"
        )

    def open(opening: Opening) -> RetokenizingProposer:
        return RetokenizingProposer(
            opening.name,
            executor,
            opening.caches[0],
            target.tokenizer,
            draft.tokenizer,
            config.num_speculative_tokens,
            _max_model_len(config, executor),
            config.confidence_threshold,
        )

    found = ("another vocabulary: reads and guesses text, which is tokenised anew",)
    return LoadedProposer("draft_model", open, (executor,), found=found, is_learned=True)


def _max_model_len(config: DraftModelConfig, executor: Executor) -> int:
    return min(executor.max_model_len, config.max_model_len or executor.max_model_len)
