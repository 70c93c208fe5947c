import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Two processes of one gloo group, started at the first use."""
    started = Ranks()
    yield started
    started.stop()
