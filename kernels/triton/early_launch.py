"""Launches whose programs come to the GPU while the launch before still runs, as Hopper and later have it.

CUDA calls that programmatic dependent launch. Programs that come early ask for their weights and wait for everything else, so that
the memory has work between two kernels too. What is launched in the usual way stays in order with these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

launching_early: set[torch.device] = set()
"""Devices where it is done. Who adds one has tried it there: launch_trial.py."""


def launch_options(device: torch.device) -> dict[str, bool]:
    """Of a kernel all of whose programs begin with `await_inputs(EARLY)`, or else wait for their inputs and let the next come."""
    return {"EARLY": True, "launch_pdl": True} if device in launching_early else {"EARLY": False}


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """What a short kernel begins with: `let_next_come` and `wait_for_inputs` at once."""
    let_next_come(EARLY)
    wait_for_inputs(EARLY)


@triton.jit
def let_next_come(EARLY: tl.constexpr):
    """Programs of the next launch come when all of this one have said so or ended.

    A kernel that keeps the memory busy says it behind its loop: what the next one asks for before would only be in its way, and would
    have left the cache again when it is wanted.
    """
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait for what all launches before have written. Before it nothing may be written, and nothing be read but weights; behind a
    product of the same pass the batch may be, too: that product has waited for it before it let anybody come.
    """
    if EARLY:
        gdc_wait()


@triton.jit
def ask_for(pointers, mask, BYTES: tl.constexpr):
    """Bring the BYTES of memory from each pointer on into the GPU's cache, some time. All are multiples of 16."""
    tl.inline_asm_elementwise(
        "{ .reg .pred %wanted; setp.ne.s32 %wanted, $2, 0; @%wanted cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [pointers.to(tl.int64), mask.to(tl.int32), BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
