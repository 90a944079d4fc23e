"""benchmarks/calibrate.py: names it refuses, presets it writes. Measuring itself is left to the benchmark."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from benchmarks import calibrate, calibrate_rank
from benchmarks.calibrate_rank import Bench, Options, Sizes
from conf.compose import compose
from conf.schema import ClusterConfig
from training import runtime

MACHINE = {
    "date": "2026-01-31",
    "processor": "Abacus",
    "cores": 2,
    "torch": "2.13",
    "ranks": 2,
    "gpu": "",
    "load_average": 0.1,
}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("My-Cluster.yaml", "my_cluster"),
        ("../h100", "h100"),
        ("a b", "a_b"),
        ("8gpus", "gpus"),
        ("é", "mine"),
        ("", "mine"),
    ],
)
def test_a_name_that_is_none_is_refused_with_one_that_is(name, near):
    with pytest.raises(ValueError, match=f"must be a lower-case word.*: use {near}"):
        calibrate.place(name, overwrite=True)


def test_a_preset_is_replaced_only_where_asked(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"NAME=laptop: conf/cluster/laptop.yaml exists.*--overwrite"):
        calibrate.place("laptop", overwrite=False)
    assert calibrate.place("laptop", overwrite=True) == calibrate.FOLDER / "laptop.yaml"
    monkeypatch.setattr(calibrate, "FOLDER", tmp_path)
    assert calibrate.place("laptop", overwrite=False) == tmp_path / "laptop.yaml"


def test_a_preset_has_every_key_and_marks_what_was_not_measured():
    presets = dataclasses.asdict(compose(["cluster=laptop"]).cluster)
    rates = {key: 1e10 / 3 for key in calibrate.KEYS if key not in ("name", "block_bytes")}
    rates |= {"device": "cpu", "node_gpus": 16, "node_nics": 1, "nic_bytes_per_second": None}
    cluster, missing = calibrate.complete(rates, presets, "abacus")
    assert missing == ["nic_bytes_per_second"]
    text = calibrate.preset(cluster, missing, MACHINE, "laptop")
    found = OmegaConf.merge(OmegaConf.structured(ClusterConfig), OmegaConf.create(text))
    assert not OmegaConf.missing_keys(found)
    assert (found.name, found.block_bytes, found.node_gpus) == ("abacus", "64M", 16)
    assert found.linear_flops == pytest.approx(1e10 / 3, rel=1e-2)
    assert found.nic_bytes_per_second == presets["nic_bytes_per_second"]
    assert "nic_bytes_per_second: 1.00e9  # not measured: that of laptop" in text


def test_what_does_not_compose_leaves_nothing_behind(tmp_path):
    path = tmp_path / "nowhere_near_conf.yaml"
    with pytest.raises(RuntimeError, match="no valid preset"):
        calibrate.write(path, "name: nowhere\n")
    assert not path.exists()


@pytest.mark.parametrize(("memory", "block"), [(4e9, 64 << 20), (84.9e9, 1 << 30), (1e6, 1 << 20), (1e13, 1 << 30)])
def test_blocks_are_a_small_share_of_memory(memory, block):
    assert calibrate.block_bytes(memory) == block


def test_one_rank_alone_measures_all_but_links(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate_rank, "CPU_QUICK", Sizes(64, 2, 1, 32, 16, 32, 1 << 12, 1 << 12))
    monkeypatch.setattr(calibrate_rank, "peak_flops", lambda device, dtype: 1.0)
    with runtime.session(compose([])) as here:
        rates = Bench(here, Options(head_dim=16, folder=str(tmp_path), quick=True)).rates()
    assert {key for key, value in rates.items() if value is None} == {
        "link_bytes_per_second",
        "nic_bytes_per_second",
        "latency_seconds",
    }
    assert set(rates) == set(calibrate.KEYS) - {"name", "block_bytes"}
    assert rates.pop("device") == "cpu" and all(value > 0 for value in rates.values() if value is not None)
    assert rates["peak_flops"] == rates["linear_flops"]  # nobody reaches more than the peak
    assert not list(tmp_path.iterdir())
