"""What tests on a GPU do about a mistake there that spoils the whole process."""

import os

import torch


def leave_if_spoiled() -> None:
    """Before each test. Where pytest runs several processes, one in which every later test would fail makes room for another, at the
    cost of one test."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)
