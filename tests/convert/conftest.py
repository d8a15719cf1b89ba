import pytest


def pytest_collection_modifyitems(items):
    """torch warns that it saves and loads in a single process, which is what these tests are about."""
    for item in items:
        if "convert" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore:torch.distributed is disabled"))
