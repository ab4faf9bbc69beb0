"""What boot returns, as far as the engine thread and the app look, around a network that needs no checkpoint."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hash_model import HashModel
from transformers import PreTrainedTokenizerBase

from foretoken.engine.committer import Committer
from foretoken.engine.config import EngineConfig, SchedulerConfig
from foretoken.engine.controller import Controller
from foretoken.engine.core import EngineCore
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.intake import Intake
from foretoken.engine.kv_cache import KVCache
from foretoken.engine.policy.base import ProposerInfo
from foretoken.engine.request import Request
from foretoken.engine.runner import Runner
from foretoken.engine.sampler import full_logits_wanted
from foretoken.engine.scheduler import NetworkNeeds, Scheduler
from foretoken.engine.verifier import Verifier
from foretoken.proposers.config import SpeculativeConfig
from foretoken.proposers.proposer_set import ProposerSet

CONTEXT, BLOCK_SIZE, NUM_BLOCKS = 256, 4, 400


def hash_core(
    vocab_size: int, proposers: ProposerSet, speculative: SpeculativeConfig, scheduling: SchedulerConfig, num_blocks: int = NUM_BLOCKS,
    new_detokenizer: Callable[[Request], Any] = lambda r: None,
) -> EngineCore:
    model: Any = HashModel(vocab_size)
    kv = KVCache(num_blocks, BLOCK_SIZE, "hash", True)
    controller = Controller(speculative, tuple(ProposerInfo(one.name, one.max_tokens) for one in proposers.proposers))
    runner = Runner(model, model.allocate(num_blocks, BLOCK_SIZE), (), full_logits_wanted)
    scheduler = Scheduler(scheduling, kv, controller, NetworkNeeds(vocab_size, CONTEXT), proposers.forget)
    committer = Committer(kv, scheduler, runner.move_slots, new_detokenizer)
    return EngineCore(scheduler, proposers, runner, Verifier("match"), committer, controller)


def hash_engine(
    tokenizer: PreTrainedTokenizerBase, proposers: ProposerSet, speculative: SpeculativeConfig, max_num_seqs: int = 8, **settings: Any
) -> Any:
    """settings: EngineConfig's."""
    vocab_size, names = len(tokenizer), tuple(proposers.names)
    config = EngineConfig(scheduler=SchedulerConfig(64, max_num_seqs, 16), **settings)
    new_detokenizer = lambda r: Detokenizer(tokenizer, r.prompt_token_ids, r.params)  # noqa: E731
    return SimpleNamespace(
        core=hash_core(vocab_size, proposers, speculative, config.scheduler, new_detokenizer=new_detokenizer),
        intake=Intake(tokenizer, vocab_size, vocab_size, CONTEXT, NUM_BLOCKS * BLOCK_SIZE, [0], names),
        config=config,
        adapters=None,
        sampling={},
        max_loras=None,
        model=SimpleNamespace(name="tiny", max_model_len=CONTEXT, vocab_size=vocab_size),
        tokenizer=tokenizer,
        proposer_names=names,
        num_spec_tokens=24,
        speculative=speculative,
    )
