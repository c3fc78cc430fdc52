"""A pytest plugin (`-p warm`): what tests start begins with everything imported, as in the suite's own processes."""

import warm_python


def pytest_configure() -> None:
    warm_python.install()
