"""Launches whose programs come to the GPU while the launch before still runs, as Hopper and later have it.

CUDA calls that programmatic dependent launch. Programs that come early ask for their weights and wait for everything else, so that
the memory has work between two kernels too. What is launched in the usual way stays in order with these.
"""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

launching_early: set[torch.device] = set()
"""Devices where it is done. Who adds one has tried it there: launch_trial.py."""


def launch_options(device: torch.device) -> dict[str, bool]:
    """Of a kernel that begins with `await_inputs(EARLY)`."""
    return {"EARLY": True, "launch_pdl": True} if device in launching_early else {"EARLY": False}


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Let programs of the next launch come, and wait for what all launches before have written.

    Every program has to begin with it. Before it nothing may be written, and nothing be read but weights.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def ask_for(pointers, mask):
    """Bring the lines of memory that are pointed to into the GPU's cache, some time."""
    tl.inline_asm_elementwise(
        "{ .reg .pred %wanted; setp.ne.s32 %wanted, $2, 0; @%wanted prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
