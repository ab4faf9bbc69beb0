"""Collects hidden states of the target while it serves, for training drafters. Guesses nothing.

Owns the states of running requests until they are written; hidden_shards.py knows the files.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.layout import FINAL
from .base import Draft, DraftContext, Feedback, Needs
from .config import HiddenStatesConfig
from .config_entry import SpeculativeConfigError
from .hidden_shards import Part, ShardFolder
from .loading import LoadedProposer, Resources, TargetView


def load(config: HiddenStatesConfig, resources: Resources) -> LoadedProposer:
    """Raises SpeculativeConfigError if there are no such layers, or the directory cannot be used."""
    layers = _layers(config.layers, resources.target)
    folder = ShardFolder(Path(os.path.expanduser(config.directory)), resources.target.folder.name, layers)
    read = ", ".join("after the final norm" if layer == FINAL else f"before layer {layer}" for layer in layers)
    return LoadedProposer(
        "extract_hidden_states",
        lambda opening: HiddenStatesProposer(opening.name, folder, layers, config.max_shard_tokens),
        found=(f"states {read}, to {folder.path}",),
    )


@dataclass(slots=True)
class _Run:
    """Consecutive positions of one request, in memory."""

    start: int
    token_ids: list[int] = field(default_factory=list)
    states: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


class HiddenStatesProposer:
    """Implements `Proposer`. What a request computes is kept from its first step on, and written after it has ended well.

    A shard is written when that many tokens of ended requests are in memory; when as many again are of running ones, theirs are
    written too, so that memory is bounded: such a request has several parts. Positions that the prefix cache had are missing:
    nothing computed them. Of aborted, failed and preempted requests only parts already written remain.
    """

    max_tokens = 0

    def __init__(self, name: str, folder: ShardFolder, layers: tuple[int, ...], max_shard_tokens: int) -> None:
        self.name = name
        self.needs = Needs(hidden=tuple(sorted(layers)))
        self._folder = folder
        self._layers = layers
        self._max_shard_tokens = max_shard_tokens
        self._running: dict[str, _Run] = {}
        self._complete: list[Part] = []

    def propose(self, context: DraftContext) -> Draft:
        return Draft.empty(len(context.rows))

    def observe(self, feedback: Feedback) -> None:
        """Raises OSError if a shard cannot be written; its states are lost then."""
        ended = {request.request_id for request in feedback.ended}
        for i, request_id in enumerate(feedback.request_ids):
            if feedback.finished[i] and request_id not in ended:
                self._running.pop(request_id, None)
                continue
            self._take(feedback, i)
            if request_id in ended:
                self._complete_part(request_id, finished=True)
        num_complete = sum(len(part.token_ids) for part in self._complete)
        if num_complete + sum(len(run.token_ids) for run in self._running.values()) >= 2 * self._max_shard_tokens:
            for request_id in list(self._running):
                self._complete_part(request_id, finished=False)
            self._write()
        elif num_complete >= self._max_shard_tokens:
            self._write()

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def check(self) -> None:
        for run in self._running.values():
            lengths = {boundary: sum(map(len, states)) for boundary, states in run.states.items()}
            assert lengths == dict.fromkeys(self._layers, len(run.token_ids)), "a token without a state, or a state without a token"
        held = sum(len(run.token_ids) for run in self._running.values()) + sum(len(part.token_ids) for part in self._complete)
        assert held < 2 * self._max_shard_tokens, "more is held than may be"

    def close(self) -> None:
        """Requests that are still running have not ended: theirs is not written."""
        self._running.clear()
        self._write()

    def _take(self, feedback: Feedback, i: int) -> None:
        """Keep the states of everything that the step committed of row i. A stop may have cut the accepted path."""
        begin, known, token_ids = feedback.query_start_loc[i], feedback.num_scheduled[i], feedback.token_ids[i]
        path = feedback.accepted[i][: len(feedback.emitted[i])]
        rows = torch.tensor([*range(begin, begin + known), *(begin + known + node for node in path)])
        stop = feedback.num_committed[i]
        start, request_id = stop - len(rows), feedback.request_ids[i]
        run = self._running.get(request_id)
        if run is not None and run.stop != start:
            self._complete_part(request_id, finished=False)
            run = None
        if run is None:
            run = self._running[request_id] = _Run(start, states={boundary: [] for boundary in self._layers})
        run.token_ids += token_ids[start:stop]
        for boundary in self._layers:
            run.states[boundary].append(feedback.hidden[boundary][rows].cpu())

    def _complete_part(self, request_id: str, finished: bool) -> None:
        run = self._running.pop(request_id)
        states = {boundary: torch.cat(parts) for boundary, parts in run.states.items()}
        self._complete.append(Part(request_id, run.start, run.token_ids, states, finished))

    def _write(self) -> None:
        parts, self._complete = self._complete, []
        if parts:
            self._folder.write(parts)


def _layers(wanted: tuple[int, ...], target: TargetView) -> tuple[int, ...]:
    """Boundary ids; without any those that EAGLE-3 reads, as far as the target has them, and the last."""
    count = target.num_layers
    if not wanted:
        return (*sorted({boundary for boundary in (2, count // 2, count - 3) if 0 <= boundary <= count}), FINAL)
    wrong = [boundary for boundary in wanted if not FINAL <= boundary <= count]
    if wrong or len(set(wanted)) < len(wanted):
        raise SpeculativeConfigError(
            f"'layers' must be different boundaries from 0 to {count}, or {FINAL} for the state after the final norm, not {list(wanted)}"
        )
    return wanted
