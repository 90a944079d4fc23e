"""Markers come from the folder: tests/unit is `unit`, tests/distributed is `distributed`."""

import os
from pathlib import Path

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these tests are about ranks on the CPU, also on a machine with GPUs

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
