from tests.support.patience import peer_patience  # noqa: F401 - a fixture
