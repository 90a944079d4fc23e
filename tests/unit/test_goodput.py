"""How often to save, and where the time of a run has gone."""

import json
import math
import random
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from conf.compose import compose
from training.goodput import CAUSES, main, measured, sentence, table
from training.save_clock import (
    LONGEST_INTERVAL,
    RESTART_SECONDS,
    SaveClock,
    duration,
    expected,
    forecast,
    interval_seconds,
    mtbf_seconds,
)

START = 1_700_000_000.0


def simulated(save, interval, mtbf, restart, seed=0, intervals=20_000):
    """Useful share, by playing it: failures come at any moment, and an interval begins again from the last save."""
    deal, now = random.Random(seed), 0.0
    failure = deal.expovariate(1 / mtbf)
    for _ in range(intervals):
        while now + interval + save > failure:
            now = failure
            failure = now + deal.expovariate(1 / mtbf)
            while now + restart > failure:  # a restart can fail, too
                now = failure
                failure = now + deal.expovariate(1 / mtbf)
            now += restart
        now += interval + save
    return intervals * interval / now


@pytest.mark.parametrize(
    ("save", "interval", "mtbf", "restart"),
    [(10, 300, 3600, 60), (120, 900, 3600, 300), (1, 30, 600, 5), (60, 3600, 3600, 600)],
)
def test_expected_share_is_that_of_a_simulation(save, interval, mtbf, restart):
    assert expected(save, interval, mtbf, restart) == pytest.approx(simulated(save, interval, mtbf, restart), rel=0.01)


@pytest.mark.parametrize(("save", "mtbf"), [(1, 3600), (30, 3600), (300, 7200), (5, 1e6)])
def test_interval_is_where_the_expected_share_is_largest(save, mtbf):
    """Young and Daly against a search: the formula loses no more than a thousandth."""
    best = max(expected(save, 1.02**power, mtbf, 60) for power in range(900))
    assert expected(save, interval_seconds(save, mtbf), mtbf, 60) >= best * 0.999
    assert interval_seconds(save, mtbf) == pytest.approx(math.sqrt(2 * save * mtbf), rel=0.2)  # Young's


def test_extremes_do_not_overflow():
    assert interval_seconds(100, 10) == 10  # a save takes longer than machines last
    assert expected(1, 1e9, 1.0, 0) == 0 and expected(1, 1, 1.0, 1e9) == 0
    assert expected(0.0, 1.0, 1e12, 0.0) == pytest.approx(1)


def test_time_between_failures_shrinks_with_the_ranks():
    assert mtbf_seconds(compose([]), 16_384) == pytest.approx(3600 * 50_000 / 16_384)  # about 3 hours, as Llama 3 had
    assert mtbf_seconds(compose(["run.mtbf_hours=2"]), 16_384) == 7200


@dataclass
class Record:
    step: int
    blocked_seconds: float
    write_seconds: float = 0.0


def due_steps(clock, seconds, steps):
    return [step for step in range(1, steps + 1) if clock.due(step, step * seconds)]


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 12]), (0, [])])
def test_clock_by_steps(every, steps):
    clock = SaveClock(compose([f"checkpoint.every={every}"]), 8, 1e9, now=0.0)
    assert due_steps(clock, 100.0, 12) == steps


def test_clock_by_what_a_save_costs():
    """A save of 2 s and a failure each hour: every sqrt(2 · 2 · 3600) = 120 s, by Young."""
    clock = SaveClock(compose(["run.mtbf_hours=1"]), 8, estimate_seconds=2.0, now=0.0)
    steps = due_steps(clock, 10.0, 40)
    assert [after - before for before, after in zip([0, *steps], steps, strict=False)] == [13] * len(steps)
    assert "about 2 s" in clock.sentence() and "each 1h00m" in clock.sentence()
    for step in range(20, 27):
        clock.saved(Record(step, 8.0))
    assert clock.interval_seconds == pytest.approx(240, rel=0.05)
    for _ in range(5):
        clock.saved(Record(26, 8000.0))  # the same one again
    assert clock.save_seconds == 8.0


def test_clock_stays_within_bounds():
    """At most an hour; not before a write in the background has ended; each step where a save is free."""
    reliable = SaveClock(compose(["run.mtbf_hours=1000000"]), 1, 60.0, 0.0)
    assert reliable.interval_seconds == LONGEST_INTERVAL == 3600
    assert not reliable.due(1, 3659.0) and reliable.due(2, 3660.0)
    clock = SaveClock(compose(["run.mtbf_hours=1"]), 1, 0.0, 0.0)
    assert due_steps(clock, 1.0, 3) == [1, 2, 3]
    clock.saved(Record(3, 0.001, write_seconds=500.0))
    assert not clock.due(4, 400.0) and clock.due(5, 504.0)
    assert not clock.due(6, 2000.0, writing=True) and clock.due(6, 2001.0)


def test_plans_and_runs_mean_the_same_interval():
    config = compose(["run.mtbf_hours=1"])
    clock = SaveClock(config, 8, 2.0, 0.0)
    assert forecast(config, 8, 2.0, 10.0).interval_seconds == clock.interval_seconds == interval_seconds(2.0, 3600)


@pytest.mark.parametrize(
    ("overrides", "save", "text"),
    [
        (["checkpoint.every=1"], 1.0, "after every step"),
        (["checkpoint.every=20"], 1.0, "after each 20 steps"),
        (["checkpoint.every=0"], 1.0, "after the last step only"),
        (
            ["run.mtbf_hours=10000"],
            0.0,
            "after every step: a save takes about 0 s; saves and failures alone leave 100.00 % of the time",
        ),
        (
            ["run.mtbf_hours=1"],
            2.0,
            "each 1m59s: a save takes about 2 s, a failure is expected each 1h00m; saves and failures alone leave "
            "88.97 % of the time",
        ),
    ],
)
def test_clock_says_what_it_does(overrides, save, text):
    assert SaveClock(compose(overrides), 1, save, 0.0).sentence() == text


def write(path, *objects, torn=""):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects) + torn)


def row(step, at, seconds=10.0, **more):
    return {"step": step, "loss": 1.0, "step_seconds": seconds, "data_wait_seconds": 1.0, "time": START + at} | more


@pytest.fixture
def folder(tmp_path):
    """Two lives. The first: 20 s to start, steps 1 to 4 of 10 s, a validation after step 2, a save after step 3;
    killed, step 4 is lost. Down for 100 s. The second: 30 s to start, step 4 again, step 5 skipped, a save, an end.
    """
    write(
        tmp_path / "starts.jsonl",
        {"event": "start", "time": START, "step": 0},
        {"event": "ready", "time": START + 30, "step": 1},
        {"event": "start", "time": START + 175, "step": 3},
        {"event": "ready", "time": START + 215, "step": 4},
        {"event": "end", "time": START + 230, "step": 5, "reason": "SIGTERM", "save_seconds": 4.0},
        torn='{"event": "sta',
    )
    write(
        tmp_path / "metrics.jsonl",
        row(1, 30),
        row(2, 43, validation_seconds=3.0),
        row(3, 53),
        row(4, 215),
        row(5, 225, skipped=True, loss=None),
    )
    write(tmp_path / "metrics.before-step-3.jsonl", row(4, 75, save_seconds=5.0), torn='{"step": 5, "lo')
    return tmp_path


def test_time_by_cause(folder):
    """Against sums made by hand: 230 s in all."""
    goodput = measured(folder)
    assert goodput.seconds == pytest.approx(
        {
            "useful": 27 + 9,
            "start": 20 + 30,
            "lost steps": 10,
            "down": 100,
            "save": 5 + 4,
            "validation": 3,
            "data wait": 3 + 1,
            "skipped": 10,
            "other": 7 + 1,
        }
    )
    assert goodput.wall_seconds == pytest.approx(230) and goodput.share == pytest.approx(36 / 230)
    first, second = goodput.lives
    assert (first.step, first.last_step, first.reason) == (0, 4, "")
    assert (second.step, second.last_step, second.reason) == (3, 5, "SIGTERM")


def test_sentence_and_table(folder):
    goodput = measured(folder)
    text = sentence(goodput, 0.95)
    assert text.startswith("goodput 15.7 % of 3m50s: down 43.5 %, start 21.7 %, ") and text.endswith(
        "; saves and failures alone would leave 95.0 %"
    )
    lines = table(goodput).splitlines()
    assert len(lines) == 5 and all(cause in lines[0] for cause in CAUSES)
    assert "3-5" in lines[2] and lines[2].endswith("SIGTERM") and "36.0" in lines[3] and "15.7 %" in lines[4]


def test_expected_share_of_a_run_as_it_was(folder):
    goodput = measured(folder)
    assert goodput.saves == 2  # one while step 4 was on its first try, one at the end
    assert goodput.expected(1e9) is None
    write(folder / "metrics.before-step-4.jsonl", row(5, 90, save_seconds=3.0))
    goodput = measured(folder)
    assert goodput.seconds["down"] == 85
    assert goodput.expected(1000) == pytest.approx(expected(4, 12, 1000, 85 + 30))
    one = replace(goodput, lives=goodput.lives[1:])
    one.lives[0].saves = 3
    assert one.expected(1000) == pytest.approx(expected(4 / 3, 3, 1000, RESTART_SECONDS))


def killed_while_cutting(folder):
    """Steps 4 and 5 were moved, and stayed where they were; the next start was at step 3, and moved them again."""
    write(folder / "starts.jsonl", *({"event": "start", "time": START + at, "step": 0} for at in (0, 65)))
    write(folder / "metrics.jsonl", *(row(step, 10 * step + 5) for step in range(1, 6)))
    write(folder / "metrics.before-step-3.jsonl", *(row(step, 10 * step + 5) for step in (4, 5)))
    write(folder / "metrics.before-step-2.jsonl", *(row(step, 10 * step + 5) for step in (3, 4, 5)))


def validated_at_once(folder):
    """The first step of a life has a validation and a save in its row."""
    write(folder / "starts.jsonl", {"event": "start", "time": START, "step": 0})
    write(folder / "metrics.jsonl", row(1, 40, validation_seconds=15.0, save_seconds=5.0), row(2, 50))


def validated_by_the_next_start(folder):
    """Stopped in the validation of step 2, which the next start makes up for."""
    write(
        folder / "starts.jsonl",
        {"event": "start", "time": START, "step": 0},
        {"event": "end", "time": START + 33, "step": 1, "reason": "SIGTERM", "save_seconds": 2.0},
        {"event": "start", "time": START + 40, "step": 1},
    )
    write(
        folder / "metrics.jsonl",
        row(1, 20),
        row(2, 30, validation_seconds=15.0, validated=START + 65),
        row(3, 75),
    )


def as_it_was(folder):
    write(folder / "starts.jsonl", {"event": "start", "time": START, "step": 0})
    write(folder / "metrics.jsonl", *(row(step, 5 + 10 * step) for step in range(1, 5)))


@pytest.mark.parametrize(
    ("made", "wall", "causes"),
    [
        (killed_while_cutting, 65, {"lost steps": 30, "useful": 18, "start": 5, "down": 10}),
        (validated_at_once, 50, {"start": 10, "validation": 15, "save": 5, "useful": 18}),
        (validated_by_the_next_start, 75, {"start": 20, "validation": 15, "useful": 27, "down": 7, "other": 1}),
        (as_it_was, 45, {"start": 5, "useful": 36}),
    ],
)
def test_each_second_has_one_cause(tmp_path, made, wall, causes):
    """The sum is what lies between the first start and the last sign: nothing counts twice, nothing is negative."""
    made(tmp_path)
    goodput = measured(tmp_path)
    assert sum(goodput.seconds.values()) == pytest.approx(wall, rel=0.01)
    assert {cause: goodput.seconds[cause] for cause in causes} == pytest.approx(causes)


def test_a_life_that_ended_before_its_first_step(tmp_path):
    starts = [{"event": "start", "time": START + at, "step": 0} for at in (0, 50)]
    write(tmp_path / "starts.jsonl", *starts)
    goodput = measured(tmp_path)
    assert goodput.seconds["down"] == 50 and goodput.share == 0 and goodput.expected(100) is None
    assert sentence(goodput) == "goodput 0.0 % of 50s: down 100.0 %"


def test_rows_of_before_there_was_a_time_do_not_count(tmp_path):
    write(tmp_path / "starts.jsonl", {"event": "start", "time": START, "step": 1})
    write(tmp_path / "metrics.jsonl", {"step": 1, "step_seconds": 5.0}, row(2, 20))
    assert measured(tmp_path).seconds["useful"] == 9


def test_command(folder, capsys, tmp_path_factory):
    (folder / "checkpoints" / "step_00000003").mkdir(parents=True)
    manifest = {"config": {"run": {"mtbf_hours": None}}, "layout": {"ranks": 8}}
    (folder / "checkpoints" / "step_00000003" / "manifest.json").write_text(json.dumps(manifest))
    write(folder / "metrics.before-step-4.jsonl", row(5, 90, save_seconds=3.0))
    assert main([str(folder)]) == 0
    assert "alone would leave " in capsys.readouterr().out.splitlines()[-1]
    assert main([str(tmp_path_factory.mktemp("empty"))]) == 3 and "no starts.jsonl" in capsys.readouterr().err
    for wrong in ([], ["a", "b"]):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        out, err = capsys.readouterr()
        assert left.value.code == 3 and out == "" and len(err.splitlines()) == 1
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0 and "RUN_FOLDER" in capsys.readouterr().out


def test_no_torch():
    """It answers on a login node."""
    code = (
        "import sys, training.goodput, training.continuity, training.config_change; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (60, "1m00s"),
        (3599.6, "1h00m"),
        (3 * 3600 + 65, "3h01m"),
        (2 * 86_400 + 3 * 3600, "2d03h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_clock_that_went_back(tmp_path):
    """A requeue on a node that is an hour behind: no time is negative, and nothing is refused."""
    first = {"event": "start", "time": START + 3600, "step": 0}
    write(tmp_path / "starts.jsonl", first, {"event": "start", "time": START, "step": 1})
    write(tmp_path / "metrics.jsonl", row(1, 3630), row(2, 30))
    goodput = measured(tmp_path)
    assert len(goodput.lives) == 2 and min(goodput.seconds.values()) >= 0
    assert 0 <= goodput.share <= 1
