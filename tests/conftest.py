"""Markers come from the folder: tests/unit is `unit`, tests/distributed is `distributed`, tests/gpu is `gpu`."""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """All tests but tests/gpu are about ranks on the CPU, also on a machine with GPUs: started before torch looks."""
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path == TESTS / "gpu" or TESTS / "gpu" in path.parents for path in asked):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
