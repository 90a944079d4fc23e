"""Markers come from the folder: tests/unit is `unit`, tests/distributed is `distributed`."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
