"""One rank of `python train.py` stops without dying: the others name it and end."""

import json
import signal
import time
from pathlib import Path

import pytest

from benchmarks.drill_kills import command, write_corpus
from benchmarks.drill_life import Life
from training.launcher import PEER

LIMIT_SECONDS = 5
SLACK_SECONDS = 25  # to write stacks, and to end, on a machine that is busy
OVERRIDES = [f"timeouts.step_seconds={LIMIT_SECONDS}", "run.heartbeat_seconds=1", "train.steps=1000"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workplace")
    write_corpus(folder / "corpora" / "tiny")
    return folder


@pytest.mark.parametrize("stopped", [2, 0])
def test_a_stopped_rank_is_named_and_ends_the_run(workplace, stopped):
    """C109. Rank 0, too, which writes the log and holds the checkpoints' manifest."""
    run = workplace / "runs" / f"stopped_{stopped}"
    with Life(command(run.name, *OVERRIDES), workplace, run) as life:
        assert life.wait_for("train", 3, limit_seconds=120), life.said()
        sign = json.loads((run / "heartbeat" / f"rank_{stopped:05}.json").read_text())
        assert sign["pid"] in life.ranks()
        life.send(signal.SIGSTOP, [sign["pid"]])
        began = time.monotonic()
        code, left = life.end(LIMIT_SECONDS + 60)
        seconds = time.monotonic() - began
        assert (code, left) == (PEER, []), life.said()
        assert seconds < LIMIT_SECONDS + SLACK_SECONDS, life.said()
        lines = [line for line in life.said().splitlines() if "stalled" in line]
        assert len(lines) == 1 and f"stalled: rank {stopped} on {sign['host']} has not been heard for" in lines[0]
    (report,) = (run / "heartbeat").glob("stalled*.txt")
    assert report.read_text().strip() in lines[0]
    for rank in {0, 1, 2, 3} - {stopped}:
        assert "train_step" in (run / "heartbeat" / f"rank_{rank:05}.stacks").read_text()
