"""EAGLE 1 to 3, P-EAGLE and Gumiho: a few layers that go on from the target's own hidden states (Li et al. 2024, 2024, 2025).

Tells what a checkpoint is made of, binds its programs and chooses how guesses come: a chain, a tree, or all in one pass.
"""

from collections.abc import Callable

from torch import Tensor

from ..kernels.batch_lists import BatchMemory
from ..kernels.fuse import fuse
from ..kernels.layout import FINAL, Executor
from .checkpoint import Checkpoint
from .config import DEFAULT_NUM_SPECULATIVE_TOKENS, EagleConfig, StaticTree
from .config_entry import SpeculativeConfigError
from .draft_layers import readable_length
from .draft_tensors import DraftTensors, program_weights
from .drafting import OwnCache, Pairing
from .eagle_checkpoint import EagleDraft, read_draft, spellings
from .eagle_program import TOKEN_MAP, draft_program, encoder_program
from .features import Features
from .guessing import ChainGuesser, Drawing, Guesser, Network, ParallelGuesser, single_tokens, unchanged
from .gumiho import NUM_SERIAL, GumihoGuesser, row_networks
from .learned import LearnedProposer
from .loading import LoadedProposer, Opening, Resources
from .tree_guessing import TreeGuesser


def load(config: EagleConfig, resources: Resources) -> LoadedProposer:
    """Both methods: which of the drafters it is, the checkpoint says. Raises SpeculativeConfigError, UnsupportedModel."""
    target = resources.target
    checkpoint = Checkpoint(resources.find_folder(config.model, config.revision))
    tensors = DraftTensors(checkpoint, spellings)
    draft = read_draft(tensors, target, config)
    if config.tree is not None and (draft.kind == "P-EAGLE" or draft.further_heads):
        raise SpeculativeConfigError(f"{checkpoint.folder} is a {_kind(draft)}, which guesses a chain: leave the tree out")

    max_model_len = readable_length(draft.hf_config, min(target.max_model_len, config.max_model_len or target.max_model_len))
    program = fuse(draft_program(draft, tensors.has, max_model_len))
    weights = program_weights(program, tensors.has, tensors.take)
    if draft.token_ids is not None:
        weights[TOKEN_MAP] = draft.token_ids
    executor = resources.bind(program, weights, config.quantization)
    encode = _encoder(draft, tensors, config, resources) if draft.has_encoder else unchanged
    behind = row_networks(draft, tensors, resources, config.quantization) if draft.further_heads else ()
    checkpoint.refuse_unread_norms()

    num_tokens = config.num_speculative_tokens or draft.num_speculative_tokens or DEFAULT_NUM_SPECULATIVE_TOKENS
    if draft.further_heads:
        most = NUM_SERIAL + len(draft.further_heads)
        num_tokens = min(config.num_speculative_tokens or most, most)
    if config.tree is not None:
        num_tokens = len(config.tree.paths) if isinstance(config.tree, StaticTree) else config.tree.num_nodes
    state_width = len(draft.taps) * target.hidden_size

    def open(opening: Opening) -> LearnedProposer:
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        network = Network(executor, opening.caches[0], encode)
        guesser = GumihoGuesser(network, drawing, *behind) if behind else _guesser(draft, config, network, drawing)
        features = Features(draft.taps, state_width, opening.num_blocks, opening.block_size)
        cache = OwnCache(max_model_len, num_tokens, draft.embedding.rows, Pairing(shift=1, first=1), features)
        return LearnedProposer(opening.name, executor.kv_layers, cache, guesser)

    return LoadedProposer(
        name=config.method,
        open=open,
        executors=(executor,),
        bytes_per_block=Features.bytes_per_block(state_width),
        found=_found(draft, checkpoint),
        is_learned=True,
    )


def _guesser(draft: EagleDraft, config: EagleConfig, network: Network, drawing: Drawing) -> Guesser:
    if draft.mask_token is not None:
        return ParallelGuesser(network, drawing, draft.mask_token, draft.mask_state)
    return ChainGuesser(network, drawing) if config.tree is None else TreeGuesser(network, drawing, config.tree)


def _kind(draft: EagleDraft) -> str:
    return "Gumiho" if draft.further_heads else draft.kind


def _encoder(draft: EagleDraft, tensors: DraftTensors, config: EagleConfig, resources: Resources) -> Callable[[Tensor], Tensor]:
    program = encoder_program(draft, tensors.has, resources.target.hidden_size)
    weights = {name: tensors.take(name, *shape) for name, shape in program.weights.items()}
    return _Encoder(resources.bind(program, weights, config.quantization), tuple(program.inputs))


class _Encoder:
    """[T, states of all taps] -> [T, hidden size of the drafter]."""

    def __init__(self, executor: Executor, inputs: tuple[str, ...]) -> None:
        self._executor, self._inputs = executor, inputs
        self._kv = executor.allocate(1, 16)  # it has no layers that would write there
        self._batches = BatchMemory()

    def __call__(self, states: Tensor) -> Tensor:
        batch = self._batches.batch(single_tokens([0] * states.shape[0], has_logits=False))
        parts = states.chunk(len(self._inputs), -1)
        inputs = {name: part.contiguous() for name, part in zip(self._inputs, parts, strict=True)}
        return self._executor.run(batch, self._kv, (FINAL,), inputs).hidden[FINAL]


def _found(draft: EagleDraft, checkpoint: Checkpoint) -> tuple[str, ...]:
    """For people: a wrong reading of a checkpoint crashes nothing and only lowers what is accepted."""
    read = "last state" if not draft.has_encoder else f"states before layers {', '.join(map(str, draft.taps))}"
    num_layers, num_heads = int(draft.hf_config.num_hidden_layers), len(draft.further_heads)
    layers = f"{num_layers} layer{'s' * (num_layers > 1)}{' with latent attention' * draft.has_latent_attention}"
    heads = f" and {num_heads} heads behind them, {NUM_SERIAL + num_heads} guesses at most" if num_heads else ""
    embedding, head = ("the target's" if table.is_shared else "its own" for table in (draft.embedding, draft.head))
    vocabulary = f"{len(draft.token_ids)} tokens of its own" if draft.token_ids is not None else "the target's vocabulary"
    lines = [
        f"{_kind(draft)} in the layout of {draft.layout}, {layers}{heads}, reads the target's {read}",
        f"guesses {vocabulary}; embedding: {embedding}, head: {head}",
    ]
    return (*lines, *checkpoint.leftovers())
