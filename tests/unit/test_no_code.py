"""Files that would run code if anybody unpickled or instantiated them: nobody does, they are refused in one line."""

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from conf.compose import compose
from conf.schema import Degrees
from data import commands as data_commands
from data.storage import DataError
from data.tokenizer import load, load_any
from parallel.mesh import build_mesh
from tests.shards import describe_anew, describe_corpus, write_documents
from tests.tampering import lie, put_index, reseal
from training.checkpoint import commands
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.files import CheckpointError


class Trap:
    """Whoever unpickles it makes a folder."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def array(trap: Trap) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([trap], dtype=object), allow_pickle=True)
    return file.getvalue()


def archive(trap: Trap) -> bytes:
    file = io.BytesIO()
    torch.save({"state": trap}, file)
    return file.getvalue()


POISONS: dict[str, Callable[[Trap], bytes]] = {"pickle": pickle.dumps, "array": array, "archive": archive}


@pytest.fixture
def marker(tmp_path) -> Iterator[Path]:
    """The folder that must not be there when the test is over."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """A checkpoint of step 1, and what reads it."""

    def __init__(self, folder: Path):
        config = compose([])
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.checkpoints = Checkpoints(folder, config, build_mesh(Degrees(1, 1, 1, 1, accumulation=1), "cpu"))
        self.checkpoints.save(1, self.model, self.optimizer, {"tokens": 7})
        self.path = folder / "step_00000001"

    def resume(self) -> str | None:
        """The error with which the checkpoint is refused, None where it is loaded."""
        try:
            self.checkpoints.resume("auto", self.model, self.optimizer)
        except CheckpointError as error:
            return str(error)
        return None


@pytest.fixture
def run(tmp_path, group) -> Run:
    return Run(tmp_path / "checkpoints")


def looked_into(path: Path, capsys: pytest.CaptureFixture) -> dict[str, tuple[int, str]]:
    """Exit code and output of each command that looks into a checkpoint."""
    found = {}
    for command in ("verify", "list", "show"):
        code = commands.main([command, str(path)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err and (code == 0 or err.count("\n") + out.count("\n") <= 2), (command, err)
        found[command] = code, out + err
    return found


@pytest.mark.parametrize("poison", POISONS)
def test_the_traps_are_traps(poison, tmp_path):
    """Otherwise none of these tests could fail."""
    content = POISONS[poison](Trap(tmp_path / "sprung"))
    if poison == "pickle":
        pickle.loads(content)
    elif poison == "array":
        np.load(io.BytesIO(content), allow_pickle=True)
    else:
        torch.load(io.BytesIO(content), weights_only=False)
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["manifest.json", "tensors.json", "rank_00000.bin"])
def test_a_file_of_a_checkpoint(name, poison, run, marker, capsys):
    """C116: as a careless attacker leaves it."""
    (run.path / name).write_bytes(POISONS[poison](Trap(marker)))
    said = run.resume()
    assert said is not None and name in said and "\n" not in said
    codes = {command: code for command, (code, _) in looked_into(run.path, capsys).items()}
    assert codes == {"verify": 1, "list": 0, "show": 74}


@pytest.mark.parametrize("poison", POISONS)
def test_a_file_beside_those_of_a_checkpoint(poison, run, marker, capsys):
    """C116: names that torch, DCP and Python would look for; nobody opens them."""
    names = (".metadata", "__0_0.distcp", "rank_00000.bin.pt", "state.pt", "config.yaml", "sitecustomize.py")
    for folder in (run.path, run.path.parent):
        for name in names:
            (folder / name).write_bytes(POISONS[poison](Trap(marker)))
    assert run.resume() is None
    assert {code for code, _ in looked_into(run.path, capsys).values()} == {0}


def test_an_index_that_is_sealed(run, marker, capsys):
    """C116: who knows how to seal gets no further: it is read as JSON, or not at all."""
    poison = pickle.dumps(Trap(marker), protocol=0).decode()
    put_index(run.path, poison)
    assert "tensors.json cannot be read" in (run.resume() or "")
    assert looked_into(run.path, capsys)["verify"][0] == 1
    put_index(run.path, json.dumps({"py/object": "os.system", "__reduce__": ["os.system", poison]}))
    assert "not of our format" in (run.resume() or "")


def test_pieces_that_are_sealed(run, marker, capsys):
    """C116: with the right size and checksum, a pickle is numbers like any others."""
    part = run.path / "rank_00000.bin"
    poison, size = pickle.dumps(Trap(marker)), part.stat().st_size
    positions = [
        entry["pieces"][0][1]
        for name, entry in json.loads((run.path / "tensors.json").read_text())["tensors"].items()
        if name.startswith("random.")
    ]
    content = bytearray((poison * (size // len(poison) + 1))[:size])
    before = part.read_bytes()
    content[min(positions) :] = before[min(positions) :]  # else it is another fault: a random state that is none
    part.write_bytes(content)
    crc32 = f"{zlib.crc32(content):08x}"
    lie(run.path, lambda index: index["files"]["rank_00000.bin"].__setitem__("crc32", crc32))
    assert run.resume() is None
    assert {code for code, _ in looked_into(run.path, capsys).values()} == {0}


def targets(marker: Path) -> dict[str, dict[str, Any]]:
    """Configs that Hydra's `instantiate` would make a call of."""
    command = f"mkdir {marker}"
    return {
        "plain": {"_target_": "os.system", "command": command},
        "alias": {"_target_": "logging.os.system", "command": command},
        "nested": {"name": {"_target_": "subprocess.check_output", "args": ["mkdir", str(marker)]}},
        "positional": {"_target_": "builtins.eval", "_args_": [f"__import__('os').mkdir({str(marker)!r})"]},
        "resolver": {"name": "${oc.env:HOME}"},
    }


@pytest.mark.parametrize("case", ["plain", "alias", "nested", "positional", "resolver"])
def test_a_config_in_a_checkpoint(case, run, marker, capsys):
    """C117: nothing is instantiated, and what this version does not know is named."""
    config = json.loads((run.path / "manifest.json").read_text())["config"]
    config["model"] |= targets(marker)[case]
    config["logging"] |= targets(marker)[case]
    config["_target_"] = "os.system"
    reseal(run.path, config=config)
    if case in ("plain", "alias", "positional"):
        with pytest.raises(ValueError, match="model._target_=.* does not know"):
            run.resume()
    else:
        assert run.resume() is None
    assert "Traceback" not in capsys.readouterr().err
    shown = looked_into(run.path, capsys)["show"]
    assert shown[0] == 0 and os.environ.get("HOME", "/") not in shown[1].partition("config, where")[2]


@pytest.mark.parametrize(
    "override", ["+model._target_=os.system", "+_target_=os.system", "+data._target_=logging.os.system"]
)
def test_a_config_of_the_user(override):
    """C117: refused with the key."""
    with pytest.raises(ValueError, match="_target_"):
        compose([override])


def test_yaml_that_makes_objects(tmp_path, marker):
    """C117: as a preset from elsewhere; Hydra reads YAML without Python's tags."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "theirs.yaml").write_text(f"name: !!python/object/apply:os.mkdir [{marker}]\n")
    with pytest.raises((ValueError, yaml.YAMLError), match="python/object/apply:os.mkdir"):
        compose([f"hydra.searchpath=[file://{tmp_path}]", "model=theirs"])


TOKENIZERS: dict[str, Callable[[Trap], bytes]] = POISONS | {
    "json": lambda trap: json.dumps(
        {
            "model": {"type": "BPE", "vocab": {}, "merges": [], "_target_": "os.mkdir"},
            "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
            "decoder": {"type": "os.mkdir", "__reduce__": ["os.mkdir", str(trap.marker)]},
        }
    ).encode(),
    "json by pickle's name": lambda trap: b'{"' + pickle.dumps(trap),
}


@pytest.mark.parametrize("poison", TOKENIZERS)
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_tokenizer(name, poison, tmp_path, marker):
    """C116: a SentencePiece model or a tokenizer.json is parsed by its library, or refused."""
    path = tmp_path / name
    path.write_bytes(TOKENIZERS[poison](Trap(marker)))
    for where in (path, tmp_path):
        with pytest.raises(DataError) as refused:
            load(where)
        assert name in str(refused.value)
        with pytest.raises(ValueError, match=f"data.tokenizer=.*{name}"):
            load_any(where)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A corpus of one side, with one shard."""
    write_documents(tmp_path / "corpus" / "train", [[1, 2, 3], [4, 5]], vocab_size=8)
    describe_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


def commands_of_data(path: Path, capsys: pytest.CaptureFixture) -> dict[str, tuple[int, str]]:
    found = {}
    for command in ("verify", "inspect", "cat"):
        code = data_commands.main([command, str(path)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        found[command] = code, out + err
    return found


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["documents.npy", "crc.npy", "digests.npy", "documents.jsonl", "manifest.json"])
def test_a_file_of_a_token_shard(name, poison, corpus, marker, capsys):
    """C116: an array of objects is a pickle; also where its hash is that of the manifest."""
    shard = corpus / "train" / "shard"
    (shard / name).write_bytes(POISONS[poison](Trap(marker)))
    if name != "manifest.json":
        describe_anew(shard)
    found = commands_of_data(corpus / "train", capsys)
    code, said = found["verify"]
    assert code == 74 and str(shard) in said, said
    if name in ("documents.npy", "crc.npy", "manifest.json"):  # the others are read by verify only
        assert found["inspect"][0] == 74 and str(shard) in found["inspect"][1], found["inspect"]
        assert found["inspect"][1].count("\n") == 1


@pytest.mark.parametrize("poison", TOKENIZERS)
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "manifest.json"])
def test_a_file_of_a_corpus(name, poison, corpus, marker, capsys):
    """C116"""
    (corpus / name).write_bytes(TOKENIZERS[poison](Trap(marker)))
    found = commands_of_data(corpus, capsys)
    assert found["verify"][0] == 74 and name in found["verify"][1], found["verify"]
    if name != "manifest.json":
        code, said = found["cat"]  # which decodes
        assert code != 0 and said.count("\n") == 1, said


@pytest.mark.parametrize("poison", POISONS)
def test_a_megatron_index(poison, tmp_path, marker, capsys):
    """C116"""
    (tmp_path / "theirs.bin").write_bytes(b"\0" * 64)
    (tmp_path / "theirs.idx").write_bytes(POISONS[poison](Trap(marker)))
    for command, (code, said) in commands_of_data(tmp_path / "theirs", capsys).items():
        assert code == 74 and "theirs" in said, (command, said)
