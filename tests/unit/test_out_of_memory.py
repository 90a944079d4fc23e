"""The report that running out of memory leaves, on the CPU."""

import gc

import numpy as np
import pytest
import torch

from conf.compose import compose
from training.out_of_memory import largest_tensors, out_of_memory, report_out_of_memory


def report(folder, ask, plan=lambda: ["12.34 GB at its peak: backward of layer 3"], **options):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        with report_out_of_memory(compose([]), folder, 13, plan, **options):
            ask()
    return error.value


def tensor_too_large():
    kept = torch.zeros(1 << 20, 3)
    return kept, torch.empty(1 << 50)


@pytest.mark.parametrize("ask", [tensor_too_large, lambda: np.empty(1 << 50)])
def test_report_has_what_was_asked_held_and_planned(tmp_path, ask):
    error = report(tmp_path, ask, where=lambda: "step 7, micro-batch 1")
    path = tmp_path / "memory" / "rank_00013.txt"
    assert error.__notes__ == [f"what was held when memory ran out: {path}"]
    text = path.read_text()
    assert "allocate" in text and "step 7, micro-batch 1" in text and "12.34 GB at its peak" in text
    assert "process, now" in text and "machine, available" in text
    if ask is tensor_too_large:  # the frame that asked is still there, with what it holds
        assert "4503599627370496 bytes" in text
        assert "0.013 GB      1 × float32[1048576, 3] on cpu" in text


def test_other_errors_leave_nothing(tmp_path):
    error = report(tmp_path, lambda: torch.zeros(2) @ torch.zeros(3))
    assert not hasattr(error, "__notes__") and not list(tmp_path.iterdir())


def test_the_error_goes_on_where_the_report_fails(tmp_path):
    (tmp_path / "memory").write_text("a file in its place")
    assert "no report" in report(tmp_path, tensor_too_large).__notes__[0]

    def no_plan():
        raise MemoryError

    report(tmp_path / "again", tensor_too_large, no_plan)
    text = (tmp_path / "again" / "memory" / "rank_00013.txt").read_text()
    assert "(no answer: MemoryError: )" in text and "process, now" in text


def test_an_error_that_memory_led_to(tmp_path):
    """Ranks tell each other of an error by one of another class."""

    def ask():
        try:
            tensor_too_large()
        except RuntimeError as error:
            raise RuntimeError("rank 13 failed") from error

    error = report(tmp_path, ask)
    assert "DefaultCPUAllocator" in str(out_of_memory(error))
    assert "4503599627370496 bytes" in (tmp_path / "memory" / "rank_00013.txt").read_text()
    assert out_of_memory(ValueError("x")) is None
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) is not None


def test_each_storage_is_counted_once():
    gc.collect()
    whole = torch.zeros(977, 1031, dtype=torch.float64)
    views = [whole[:5], whole.T]
    lines = [line for line in largest_tensors() if "977" in line or "1031" in line]
    assert len(lines) == 1 and f"{977 * 1031 * 8 / 1e9:.3f} GB" in lines[0] and " 1 × " in lines[0]
    del views


def test_history_without_cuda_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"run\.memory_history=true .*: use false"):
        with report_out_of_memory(compose(["run.memory_history=true"]), tmp_path, 0, list):
            pass
