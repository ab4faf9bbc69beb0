"""A seeded world around the engine core: arrivals, cancels, tiny pools, drafters that fail. No torch network, no clock.

One seed decides everything. After every step all owners check themselves; in the end each output must equal the same
request run alone without speculation, and every block must be free.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hash_head import HashHead, feature_drafter
from hash_model import HashModel, RecurrentHashModel, next_token

from foretoken.engine.cache_size import StateShare
from foretoken.engine.committer import Committer
from foretoken.engine.config import SchedulerConfig
from foretoken.engine.controller import Controller
from foretoken.engine.core import EngineCore
from foretoken.engine.kv_cache import KVCache
from foretoken.engine.policy.base import ProposerInfo
from foretoken.engine.request import Request, SamplingParams, TokenDelta
from foretoken.engine.runner import Runner
from foretoken.engine.sampler import full_logits_wanted
from foretoken.engine.scheduler import NetworkNeeds, Scheduler
from foretoken.engine.verifier import Verifier
from foretoken.kernels.state_slots import StateSlots
from foretoken.proposers.base import Draft, DraftContext, Feedback, Needs, Proposer
from foretoken.proposers.config import DynamicTree, NgramConfig, SpeculativeConfig, StaticTree
from foretoken.proposers.drafting import OwnCache
from foretoken.proposers.guessing import ChainGuesser, Drawing, Network
from foretoken.proposers.learned import LearnedProposer
from foretoken.proposers.ngram import NgramProposer
from foretoken.proposers.proposer_set import ProposerSet

VOCAB = 11
EOS = 0


class WildProposer:
    """A drafter that is perfect, wrong, absurd or broken, as its dice say. Knows the target's hash, so it can be right."""

    name = "wild"
    needs = Needs()

    def __init__(self, dice: random.Random, max_tokens: int, trees: bool, misbehaves: bool) -> None:
        self.max_tokens = max_tokens
        self._dice, self._trees, self._misbehaves = dice, trees, misbehaves

    def propose(self, context: DraftContext) -> Draft:
        dice = self._dice
        if self._misbehaves and dice.random() < 0.05:
            raise RuntimeError("the drafter died")
        token_ids: list[int] = []
        parents: list[int] = []
        start_loc = [0]
        for row in context.rows:
            size = dice.randint(0, row.ceiling + (3 if self._misbehaves and dice.random() < 0.1 else 0)) if row.ceiling else 0
            known = tuple(row.token_ids)
            paths: list[tuple[int, ...]] = []
            for node in range(size):
                parent = dice.randint(-1, node - 1) if self._trees and dice.random() < 0.5 else node - 1
                path = paths[parent] if parent >= 0 else ()
                token = next_token(known + path, VOCAB)
                if dice.random() < 0.4:
                    token = dice.randrange(VOCAB)
                if self._misbehaves and dice.random() < 0.02:
                    token = dice.choice([-1, VOCAB, 2**40])
                if self._misbehaves and dice.random() < 0.02:
                    parent = dice.choice([node, node + 3, -2])
                token_ids.append(token)
                parents.append(parent)
                paths.append((*path, token))
            start_loc.append(len(token_ids))
        return Draft(token_ids, start_loc, parents, [0] * len(token_ids))

    def observe(self, feedback: Feedback) -> None:
        if self._misbehaves and self._dice.random() < 0.02:
            raise RuntimeError("the drafter cannot listen")

    def forget(self, request_id: str) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class World:
    """What one seed decides."""

    seed: int
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        dice = self.dice = random.Random(self.seed)
        self.block_size = dice.choice([1, 2, 4, 16])
        self.trees = dice.random() < 0.4
        self.misbehaves = dice.random() < 0.4
        self.max_num_seqs = dice.choice([1, 2, 5, 12])
        self.config = SchedulerConfig(
            max_num_batched_tokens=max(self.max_num_seqs, dice.choice([6, 17, 64, 512])),
            max_num_seqs=self.max_num_seqs,
            max_draft_tokens_per_step=dice.choice([0, 3, 12, 64]),
        )
        self.speculative = SpeculativeConfig(disable_by_batch_size=dice.choice([0, 1, 3, 16]))
        self.prefix_caching = dice.random() < 0.8
        self.draft_model = dice.choice([None, None, "perfect", "poor"])
        more = random.Random(self.seed + 1)
        self.second_draft_model = self.draft_model is not None and more.random() < 0.3
        self.scratch_slots = more.choice([0, 0, 3])
        self.head = more.random() < 0.4
        self.head_tree = more.choice([None, None, DynamicTree(2, 3, 5), StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))])
        states = random.Random(self.seed + 2)
        self.states: StateShare | None = None
        if states.random() < 0.4:
            num_seats = states.choice([1, self.max_num_seqs, self.max_num_seqs + 1])
            self.states = StateShare(num_seats, states.choice([0, 1, 3, 20]), states.choice([0, 2, 9, 64]), 1)
        stems = [[dice.randrange(1, VOCAB) for _ in range(dice.randint(1, 24))] for _ in range(3)]
        self.requests: list[Request] = []
        at = 0.0
        for i in range(dice.randint(1, 10)):
            prompt = dice.choice(stems)[: dice.randint(1, 24)] + [dice.randrange(1, VOCAB) for _ in range(dice.randint(0, 8))]
            at += dice.choice([0, 0, 1, 5])
            self.requests.append(
                Request(
                    f"r{i}", tuple(prompt), self._params(dice), arrival_time=at, max_tokens=dice.randint(1, 20), seed=dice.randrange(2**40),
                    eos_token_ids=frozenset([EOS]), priority=dice.choice([0, 0, 0, 1, -1]), cache_salt=dice.choice(["", "", "a"]),
                )
            )
        longest = max(r.num_prompt_tokens + r.max_tokens for r in self.requests)
        needed = -(-longest // self.block_size)
        self.num_blocks = needed + dice.choice([0, 0, 2, 8, 200])
        self.cancels = {r.request_id: r.arrival_time + dice.randint(0, 12) for r in self.requests if dice.random() < 0.15}

    @staticmethod
    def _params(dice: random.Random) -> SamplingParams:
        settings: dict[str, object] = {"temperature": 0.0, "max_tokens": None, "detokenize": False}
        if dice.random() < 0.3:
            settings |= {"temperature": 1.0, "top_k": dice.choice([0, 3])}
        if dice.random() < 0.15:
            settings |= {"presence_penalty": 0.7, "repetition_penalty": 1.2}
        if dice.random() < 0.1:
            settings |= {"speculation": {"method": dice.choice(["off", "wild"])}}
        if dice.random() < 0.2:
            settings |= {"ignore_eos": True}
        return SamplingParams(**settings)  # type: ignore[arg-type]

    def proposers(self) -> list[Proposer]:
        dice, chosen = self.dice, list[Proposer]()
        if self.draft_model is None or dice.random() < 0.3:
            chosen.append(WildProposer(dice, dice.choice([1, 4, 9]), self.trees, self.misbehaves))
        if self.draft_model is not None:
            network = HashModel(VOCAB, errs=self.draft_model == "poor")
            chosen.append(draft_model("draft_model", network, self.num_blocks, self.block_size, dice.choice([1, 3, 6])))
        if self.second_draft_model:  # keeps up beside the first one, with a shorter context
            chosen.append(draft_model("draft_model_2", HashModel(VOCAB), self.num_blocks, self.block_size, 2, max_model_len=20))
        if self.head:
            size = dice.choice([1, 2, 5]) if self.head_tree is None else 6
            head = feature_drafter("head", HashHead(VOCAB), self.num_blocks, self.block_size, size, tree=self.head_tree)
            chosen.insert(dice.choice([0, len(chosen)]), head)
        if dice.random() < 0.3:
            chosen.append(NgramProposer(NgramConfig(3, 3, 1)))
        return chosen


def draft_model(
    name: str, network: HashModel, num_blocks: int, block_size: int, max_tokens: int, max_model_len: int = 4096
) -> LearnedProposer:
    guesser = ChainGuesser(Network(network, network.allocate(num_blocks, block_size)), Drawing(VOCAB))
    return LearnedProposer(name, network.kv_layers, OwnCache(max_model_len, max_tokens, VOCAB), guesser)


def build_core(
    world: World,
    proposers: list[Proposer],
    speculative: SpeculativeConfig,
    num_blocks: int,
    kv_class: Callable[..., KVCache] = KVCache,
    fails_on: int | None = None,
) -> EngineCore:
    """The real engine around the hash model."""
    share, size = world.states, world.block_size
    states = None if share is None else StateSlots(share.num_seats, share.num_snapshots, size)
    kv = kv_class(num_blocks, size, "hash", world.prefix_caching, states)
    proposer_set = ProposerSet(proposers, clock=lambda: 0.0)
    infos = tuple(ProposerInfo(p.name, p.max_tokens) for p in proposers)
    controller = Controller(speculative, infos)
    model = HashModel(VOCAB, fails_on) if share is None else RecurrentHashModel(VOCAB, random.Random(world.seed), fails_on)
    cache = model.allocate(num_blocks, size, None if share is None else share.room)
    runner = Runner(model, cache, proposer_set.needs.hidden, full_logits_wanted, share)
    scratch_slots, most_guesses = max(world.scratch_slots, proposer_set.needs.scratch_slots), 64 if share is None else share.num_guesses
    num_ingesting = sum(p.needs.ingests for p in proposers)
    needs = NetworkNeeds(VOCAB, model.max_model_len, num_ingesting, scratch_slots, most_guesses=most_guesses)
    scheduler = Scheduler(world.config, kv, controller, needs, proposer_set.forget)
    committer = Committer(kv, scheduler, runner.move_slots, lambda request: None)
    return EngineCore(scheduler, proposer_set, runner, Verifier("match"), committer, controller)


def fresh(request: Request) -> Request:
    """The request as it arrived."""
    return Request(
        request.request_id, request.prompt_token_ids, request.params, request.arrival_time, request.max_tokens, request.seed,
        request.eos_token_ids, request.choice, request.priority, request.cache_salt,
    )


def run_alone(world: World, request: Request) -> list[int]:
    """What the request yields by itself, without speculation, in a cache that never runs out."""
    core = build_core(world, [], SpeculativeConfig(off=True), num_blocks=400)
    core.add_request(fresh(request))
    output: list[int] = []
    while core.has_work:
        for delta in core.step(0.0):
            output.extend(delta.token_ids)
    return output


def simulate(seed: int, kv_class: Callable[..., KVCache] = KVCache) -> int:
    """Run one seed's world; how many steps it took. Raises AssertionError when anything is wrong."""
    world = World(seed)
    core = build_core(world, world.proposers(), world.speculative, world.num_blocks, kv_class)
    outputs: dict[str, list[int]] = {r.request_id: [] for r in world.requests}
    ended: dict[str, TokenDelta] = {}
    arrivals = [fresh(r) for r in world.requests]
    now, steps = 0.0, 0
    while arrivals or core.has_work:
        while arrivals and arrivals[0].arrival_time <= now:
            core.add_request(arrivals.pop(0))
        for request_id, when in world.cancels.items():
            if when <= now and request_id not in ended and (delta := core.abort(request_id)) is not None:
                ended[request_id] = delta
        for delta in core.step(now):
            assert delta.request_id not in ended, f"{delta.request_id} spoke after its end"
            outputs[delta.request_id].extend(delta.token_ids)
            assert len(delta.sources) == len(delta.token_ids), "a token without a source"
            if delta.finish_reason is not None:
                ended[delta.request_id] = delta
        core.check()
        now += 1.0
        steps += 1
        assert steps < 3000, "no end in sight: the engine does not progress"
    core.check()
    assert set(ended) | set(world.cancels) == set(outputs), "a request never ended"
    for health in core.proposers.stats():
        assert health.num_failures == 0 or health.name == "wild", f"{health.name} failed: its cache went wrong"
    if world.draft_model == "perfect" and all(r.params.greedy and r.params.presence_penalty == 0 for r in world.requests):
        (perfect,) = (t for t in core.controller.counts.totals if t.name == "draft_model")
        assert perfect.num_accepted_tokens == perfect.num_draft_tokens, "a draft that knows the target was refused: its cache went wrong"
    if world.head and world.head_tree is None and all(r.params.greedy and r.params.presence_penalty == 0 for r in world.requests):
        (head,) = (t for t in core.controller.counts.totals if t.name == "head")
        assert head.num_accepted_tokens == head.num_draft_tokens, "a head that knows the target was refused: its states went wrong"
    for request in world.requests:
        expected = run_alone(world, request)
        got = outputs[request.request_id]
        delta = ended.get(request.request_id)
        if delta is not None and delta.finish_reason == "abort":
            assert got == expected[: len(got)], f"{request.request_id} went wrong before its cancel"
        else:
            assert got == expected, f"{request.request_id}: {got} != {expected}"
    return steps
