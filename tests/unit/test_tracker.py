"""Bytes of living tensors: made, dropped, resized, looked at, fake."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from training.tracker import Tracker, peak_bytes


@pytest.mark.parametrize("fake", [False, True])
def test_counts_what_is_alive(fake):
    mode = FakeTensorMode() if fake else torch.no_grad()
    with mode, Tracker(mode if fake else None) as tracker:
        a = torch.empty(1000)
        b = torch.empty(500, dtype=torch.float64)
        assert tracker.live_bytes == 8000
        view = a.view(10, 100)
        c = a + 1
        assert tracker.live_bytes == 12_000
        del a, c
        assert tracker.live_bytes == 8000  # the view keeps it
        del view, b
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 12_000)


def test_storages_that_are_resized_count_with_their_size():
    with Tracker() as tracker:
        x = torch.empty(1000)
        x.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        x.untyped_storage().resize_(8000)
        assert (tracker.live_bytes, tracker.peak_bytes) == (8000, 8000)
    y = torch.empty(10)
    y.untyped_storage().resize_(0)  # outside it is PyTorch's own again
    assert torch.UntypedStorage.resize_ is type(y.untyped_storage()).resize_


def test_what_came_from_outside_does_not_count():
    x = torch.empty(1000)
    assert peak_bytes(lambda: x.view(10, 100)) == 0
    assert peak_bytes(lambda: x.add_(1)) == 0
    assert peak_bytes(lambda: x.add(1)) == 4000


def test_says_what_was_alive_at_the_peak():
    with Tracker() as tracker:
        tracker.watch = True
        a = torch.empty(1000)
        b = torch.zeros(10, 20, dtype=torch.float64)
        del a, b
        torch.empty(10)
    assert dict(tracker.at_peak) == {
        ("aten.empty.memory_format", "float32", (1000,)): 4000,
        ("aten.zeros.default", "float64", (10, 20)): 1600,
    }
    assert sum(tracker.at_peak.values()) == tracker.peak_bytes


def test_what_an_operation_takes_inside_counts_while_it_runs():
    with Tracker() as tracker:
        tracker.watch = True
        tracker.inside[torch.ops.aten.add.Tensor] = 50_000
        a = torch.empty(1000)
        b = a + a
        assert (tracker.live_bytes, tracker.peak_bytes) == (8000, 58_000)
        del a, b
    assert tracker.at_peak["inside of kernels", "", ()] == 50_000


def test_paused_it_counts_nothing_and_goes_on_after():
    with Tracker() as tracker:
        tracker.paused = True
        a = torch.empty(1000)
        tracker.paused = False
        b = torch.empty(10)
        assert tracker.live_bytes == 40
        del a, b
        assert tracker.live_bytes == 0


def test_other_fake_tensors_do_not_count():
    """DTensor asks on fake tensors of its own what an operation would give, in full size."""
    ours = FakeTensorMode()
    with ours, Tracker(ours) as tracker:
        with FakeTensorMode():
            torch.empty(1 << 40)
        assert tracker.peak_bytes == 0


def test_numbers_of_fake_tensors_are_one():
    fake = FakeTensorMode()
    with fake, Tracker(fake):
        assert torch.empty(()).item() == 1
