from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes of one gloo group, started at the first use."""
    started = Ranks()
    yield started
    started.stop()
