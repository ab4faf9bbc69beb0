"""A plugin of pytest: tells why a test failed as soon as it has. Whoever runs tests for a limited time may never see their summary."""

from __future__ import annotations

from typing import Any

import pytest

from .gpu_report import REASON

_MOST_CHARACTERS = 300


class _Teller:
    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = " ".join(str(report.longrepr if crash is None else crash.message).split())
            self._terminal.write_line(f"\n{REASON}{report.nodeid}\t{reason[:_MOST_CHARACTERS]}")


@pytest.hookimpl(trylast=True)  # the terminal is another plugin's
def pytest_configure(config: Any) -> None:
    """Where several processes run the tests, the one that hears of all of them tells."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Teller(terminal))
