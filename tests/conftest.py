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


@pytest.fixture(scope="module")
def one_thread():
    """PyTorch's own threads, where ranks are threads already or bytes of each thread are counted."""
    import torch  # not before pytest_configure has hidden the GPUs

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
