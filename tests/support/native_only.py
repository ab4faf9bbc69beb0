"""The mark of tests that need the native executor."""

import pytest

from foretoken.kernels.native import availability

native_only = pytest.mark.skipif(availability().isa is None, reason=availability().reason)
