"""A plugin of pytest: tells why a test failed as soon as it has. Whoever runs tests for a limited time may never see their summary."""

from typing import Any

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


def pytest_sessionstart(session: Any) -> None:
    """Where several processes run the tests, the one that hears of all of them tells."""
    plugins = session.config.pluginmanager
    if not hasattr(session.config, "workerinput") and (terminal := plugins.get_plugin("terminalreporter")) is not None:
        plugins.register(_Teller(terminal))
