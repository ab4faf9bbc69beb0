"""DFlash and what grew out of it: a few layers that fill in a whole block at once, reading the target's own states (Chen et al. 2026).

Tells what a checkpoint is made of and binds its programs; block_guessing.py runs them. What stands behind the block has files of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..kernels.layout import Executor
from ..kernels.program import Program
from .block_checkpoint import BlockDraft, read_draft, spellings
from .block_guessing import BlockGuesser, Stage
from .block_heads import Correction, Heads
from .block_parts import HeadParts
from .block_program import TOKEN_MAP, block_program, context_program, stages
from .checkpoint import Checkpoint
from .config import BlockConfig, BlockTree
from .config_entry import SpeculativeConfigError
from .dflash2 import read_selector
from .domino import read_domino
from .draft_layers import readable_length
from .draft_tensors import DraftTensors, program_weights
from .drafting import OwnCache, Pairing
from .dspark import read_confidence, read_markov
from .features import Features
from .guessing import Drawing
from .learned import LearnedProposer
from .lilicorr import read_lilicorr
from .loading import LoadedProposer, Opening, Resources
from .xpress import read_xpress


def load(config: BlockConfig, resources: Resources) -> LoadedProposer:
    """Both methods: which of the drafters it is, the checkpoint says. Raises SpeculativeConfigError, UnsupportedModel."""
    target = resources.target
    checkpoint = Checkpoint(resources.find_folder(config.model, config.revision))
    tensors = DraftTensors(checkpoint, spellings)
    draft = read_draft(tensors, target)
    num_tokens, tree = _num_tokens(draft, config, checkpoint), _tree(draft, config, checkpoint)
    max_model_len = readable_length(draft.hf_config, target.max_model_len)

    def bind(program: Program) -> Executor:
        weights = program_weights(program, tensors.has, tensors.take)
        if program.token_map:
            assert draft.token_ids is not None
            weights[TOKEN_MAP] = draft.token_ids
        return resources.bind(program, weights, config.quantization)

    parts = stages(draft)
    programs = [block_program(draft, layers, tensors.has, max_model_len) for layers in parts]
    blocks = [bind(program) for program in programs]
    heads = _heads(HeadParts(draft, tensors, target, bind), config)
    is_read = heads is not None and heads.correction is not None and heads.correction.reads_context
    makers = [
        context_program(draft, layers, program, tensors.has, target.hidden_size, is_read)
        for layers, program in zip(parts, programs, strict=True)
    ]
    contexts, states = [bind(program) for program in makers], tuple(makers[0].inputs)
    checkpoint.refuse_unread_norms()
    state_width = len(draft.taps) * target.hidden_size

    def open(opening: Opening) -> LearnedProposer:
        drawing = Drawing.asked(config.draft_sample_method, target.vocab_size, opening.return_probs)
        run = [
            Stage(context, block, kv, draft.causal[layers.start], next(iter(program.inputs), ""), states)
            for context, block, kv, layers, program in zip(contexts, blocks, opening.caches, parts, programs, strict=True)
        ]
        guesser = BlockGuesser(run, drawing, draft.mask_token, draft.from_anchor, heads, tree)
        features = Features(draft.taps, state_width, opening.num_blocks, opening.block_size)
        cache = OwnCache(max_model_len, num_tokens, target.vocab_size, Pairing(shift=0, first=0), features)
        kv_layers = tuple(layer for block in blocks for layer in block.kv_layers)
        return LearnedProposer(opening.name, kv_layers, cache, guesser)

    return LoadedProposer(
        name=config.method,
        open=open,
        executors=tuple(blocks),
        bytes_per_block=Features.bytes_per_block(state_width),
        found=_found(draft, heads, tree, checkpoint),
        is_learned=True,
    )


def _tree(draft: BlockDraft, config: BlockConfig, checkpoint: Checkpoint) -> BlockTree | None:
    """No deeper than a block. Raises SpeculativeConfigError where guesses know those before them: then paths are not independent."""
    if config.tree is None:
        return None
    if draft.kind not in ("DFlash", "DFlare"):
        raise SpeculativeConfigError(f"{checkpoint.folder} is a {draft.kind}, which guesses a chain: leave the tree out")
    return replace(config.tree, depth=min(config.tree.depth, draft.max_tokens))


def _num_tokens(draft: BlockDraft, config: BlockConfig, checkpoint: Checkpoint) -> int:
    """A tree's nodes, or the config's, else the checkpoint's, else a whole block's."""
    if config.tree is not None:
        return config.tree.num_nodes
    if config.num_speculative_tokens is None:
        return min(draft.num_speculative_tokens or draft.max_tokens, draft.max_tokens)
    if config.num_speculative_tokens > draft.max_tokens:
        raise SpeculativeConfigError(
            f"num_speculative_tokens {config.num_speculative_tokens} is more than {checkpoint.folder} guesses at once: "
            f"its blocks have {draft.max_tokens}"
        )
    return config.num_speculative_tokens


def _heads(parts: HeadParts, config: BlockConfig) -> Heads | None:
    draft = parts.draft
    if config.confidence_threshold and not draft.has_confidence:
        raise SpeculativeConfigError(
            f"{parts.tensors.checkpoint.folder} has no confidence head: leave 'confidence_threshold' out, or take a DSpark that has one"
        )
    correction = read_correction(parts)
    confidence = read_confidence(parts, correction) if draft.has_confidence else None
    return None if correction is None and confidence is None else Heads(correction, confidence, config.confidence_threshold)


def read_correction(parts: HeadParts) -> Correction | None:
    """What stands behind the block of a drafter of this kind. Raises SpeculativeConfigError."""
    match parts.draft.kind:
        case "DFlash" | "DFlare":
            return None
        case "DSpark":
            return read_markov(parts)
        case "DFlash 2":
            return read_selector(parts)
        case "LiLiCorr":
            return read_lilicorr(parts)
        case "Domino":
            return read_domino(parts)
        case "XPress":
            return read_xpress(parts)


def _found(draft: BlockDraft, heads: Heads | None, tree: BlockTree | None, checkpoint: Checkpoint) -> tuple[str, ...]:
    """For people: a wrong reading of a checkpoint crashes nothing and only lowers what is accepted."""
    layers = f"{len(draft.causal)} layer{'s' * (len(draft.causal) > 1)}" + " like Gemma 4's" * draft.is_gemma4
    sees = "causal" if all(draft.causal) else "bidirectional" if not any(draft.causal) else f"causal in layers {_some(draft.causal)}"
    turns = ", rotary pairs side by side" * draft.turns_pairs
    slides = f", windows in layers {_some([window is not None for window in draft.windows])}" if any(draft.windows) else ""
    first = "the last known token's place" if draft.from_anchor else "the first mask's place"
    embedding, head = ("the target's" if table.is_shared else "its own" for table in (draft.embedding, draft.head))
    vocabulary = f"{len(draft.token_ids)} tokens of its own" if draft.token_ids is not None else "the target's vocabulary"
    lines = [
        f"{draft.kind} in the layout of {draft.layout}, {layers}, reads the target's states before layers "
        f"{', '.join(map(str, draft.taps))}",
        f"blocks of {draft.block_size}, {sees}{slides}{turns}, first guess in {first}",
        f"guesses {vocabulary}; embedding: {embedding}, head: {head}",
    ]
    if tree is not None:
        lines.append(f"a tree of the block's {tree.num_nodes} likeliest continuations, of up to {tree.top_k} tokens a place")
    if draft.conv_taps:
        lines.append(f"convolutions of {draft.conv_taps} tokens around each sublayer, {draft.conv_groups} groups")
    if draft.kind == "DSpark":
        lines.append(f"Markov head: {draft.markov or 'none'}, confidence head: {'yes' if draft.has_confidence else 'none'}")
    elif heads is not None and heads.correction is not None:
        lines.append(heads.correction.describe())
    return (*lines, *draft.settings.leftovers(), *checkpoint.leftovers())


def _some(are: Sequence[bool]) -> str:
    return ", ".join(str(i) for i, is_one in enumerate(are) if is_one)
