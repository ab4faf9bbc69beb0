"""The mark of tests that need the native executor."""

from __future__ import annotations

import pytest

from foretoken.kernels.native import availability

native_only = pytest.mark.skipif(availability().isa is None, reason=availability().reason)
