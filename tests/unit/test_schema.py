"""The config: every preset loads, and every bad value is one error that names key, value and a legal choice."""

import dataclasses
import re
from fractions import Fraction
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import ContextStage, TrainConfig, longest_stage, mixture, resolve, stages

CONF = Path(__file__).parents[2] / "conf"


def presets(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("model", presets("model"))
@pytest.mark.parametrize("data", presets("data"))
def test_every_preset_composes_and_loads(model, data):
    config = compose([f"model={model}", f"data={data}"])
    assert config.model.name == model
    assert isinstance(config.data.sequence_length, int)


@pytest.mark.parametrize(
    ("experiment", "ranks"), [("8b_1m", 32), ("7b_256k", 32), ("8b_stages", 32), ("laptop", 2), ("million", 4)]
)
def test_every_experiment_fits_its_ranks(experiment, ranks):
    assert resolve(compose([f"experiment={experiment}"]), ranks).world == ranks


def test_every_experiment_is_tested():
    assert set(presets("experiment")) == {"8b_1m", "7b_256k", "8b_stages", "laptop", "million"}


def test_published_sizes():
    """Parameters of the released models, from their papers and model cards."""
    from training.estimate import num_parameters

    assert num_parameters(compose(["model=7b"]).model) == 6_738_415_616
    assert num_parameters(compose(["model=8b"]).model) == 8_030_261_248
    assert num_parameters(compose(["model=70b"]).model) == 70_553_706_496


def test_the_dtype_of_compute_is_that_of_the_device():
    assert compose([]).train.dtype == "float32"
    assert compose(["cluster=h100_ib400"]).train.dtype == "bfloat16"
    assert compose(["cluster=h100_ib400", "train.dtype=float64"]).train.dtype == "float64"


def test_lengths():
    config = compose(["data.sequence_length=128K", "train.global_batch_tokens=262144"])
    assert config.data.sequence_length == 131_072 and config.train.global_batch_tokens == 262_144
    assert compose(["data.sequence_length=1M"]).data.sequence_length == 1_048_576
    assert compose(["train.global_batch_tokens=4m"]).train.global_batch_tokens == 4 * 1_048_576


def test_stages_take_their_own_length_and_rope():
    config = compose(
        ["context=[{tokens:1M,sequence_length:8K},{sequence_length:128K,rope_theta:1e6}]", "model.rope_theta=5e5"]
    )
    found = [(stage.data.sequence_length, stage.model.rope_theta) for stage in stages(config)]
    assert found == [(8192, 5e5), (131_072, 1e6)]
    assert longest_stage(config).data.sequence_length == 131_072
    assert stages(compose([])) == [compose([])]


def test_shares_of_a_mixture_are_exact():
    assert mixture("a:0.1, b:0.2,c:7/10") == {"a": Fraction(1, 10), "b": Fraction(1, 5), "c": Fraction(7, 10)}
    assert mixture(None) == {}


REFUSED = {
    "trian.steps=3": "Did you mean train.steps?",
    "+model.nope=1": "model.nope",
    "model.num_head=3": "Did you mean model.num_heads?",
    "model=9b": "Available options in 'model': 125m",
    "parallel.layout=zigzga": "contiguous, zigzag, striped",
    "train.steps=x": "train.steps=x",
    "parallel.tensor=3": "parallel.tensor=3 does not divide model.num_heads=4: use 2",
    "parallel.tensor=4": "parallel.tensor=4 does not divide model.num_kv_heads=2: use 2",
    "model.num_kv_heads=3": "model.num_kv_heads=3 does not divide model.num_heads=4: use 2 or 4",
    "model.head_dim=33": "use 34",
    "model.attention_pattern='window,ful'": "did you mean full?",
    "model.attention_pattern=window": "model.attention_window=0",
    "model.attention_window=8": "has a window",
    "model.attention_pattern=full,window": "Quote values",
    "data.path=/a/b=c": "Quote values",
    "data.path=~/x": "Quote values",
    "data.mixture='a:0.5,b:0.6'": "sum to 1.1, not 1: use for example a:5/11,b:6/11",
    "data.mixture='a:0.5,a:0.5'": "'a:0.5' is not NAME:SHARE",
    "data.mixture=a": "'a' is not NAME:SHARE, like books:0.7",
    "data.mixture=../a:1": "no '/'",
    "data.mixture='a:7,b:3'": "sum to 10, not 1: use for example a:7/10,b:3/10",
    "data.mixture='a:0.5;b:0.5'": "'a:0.5;b:0.5' is not NAME:SHARE",
    "data.upweight=32K": "write it like 32K:2,128K:4",
    "data.upweight=1:1001": "up to 1000 times",
    "data.upweight='1K:2,1024:3'": "says twice how often documents of 1024 tokens come",
    "data.workers=-1": "use 0 or more",
    "context=[{tokens:1M}]": "context.0.sequence_length is not set: write it like 128K",
    "context=[{sequence_length:8K},{sequence_length:16K}]": "context.0.tokens is not set",
    "context=[{sequence_lengt:8K}]": "Did you mean sequence_length?",
    "context=[{sequence_length:8K,rope_theta:0}]": "context.0.rope_theta=0.0 must be a number above 0",
    "data.sequence_length=1X": "8192, 128K or 1M",
    "data.sequence_length=0": "8192, 128K or 1M",
    "optimizer.learning_rate=0": "its default is 0.0003",
    "optimizer.learning_rate=nan": "optimizer.learning_rate=nan",
    "optimizer.beta1=1.0": "below 1",
    "optimizer.eps=-1": "optimizer.eps=-1",
    "optimizer.weight_decay=-1": "optimizer.weight_decay=-1",
    "optimizer.schedule=wsd": "1 to 90",
    "model.rope_theta=0": "model.rope_theta=0",
    "logging.peak_flops=0": "logging.peak_flops=0",
    "train.steps=0": "use 1 or more",
    "train.seed=18446744073709551616": "use 0 to 9223372036854775807",
    "parallel.data=0": "-1 for what remains",
    "run.name=a/b": "run.name='a/b'",
    "checkpoint.keep=-1": "use 0 or more",
    "parallel.ulysses=3": "does not divide parallel.sequence=1: use 1",
    "parallel.prefetch=2": "needs parallel.route=direct, not auto: use parallel.prefetch=0",
    "parallel.prefetch=-1": "use 0 or more",
    "parallel.buffer_blocks=0": "use 1 or more",
    "parallel.gradient_wire=bfloat16": "needs parallel.route=direct, not auto",
    "cluster.nic_bytes_per_second=0": "must be a number above 0",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refused_with_the_key_and_a_legal_choice(override):
    """C048, C094."""
    with pytest.raises(ValueError) as caught:
        compose([override])
    message = str(caught.value)
    assert REFUSED[override] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.sequence=3", "parallel.ulysses=3"], "4 query heads and 2 key/value heads of a rank: use 2 or 4"),
        (["parallel.route=direct", "parallel.gradient_wire=bfloat16"], "use train.dtype=bfloat16, or"),
    ],
)
def test_what_the_ring_cannot_do_is_refused(overrides, words):
    """C028, and options that would be ignored."""
    with pytest.raises(ValueError, match=words):
        compose(overrides)


@pytest.mark.parametrize(
    ("overrides", "ranks", "words"),
    [
        (["parallel.sequence=3"], 4, "start 3 ranks"),
        (["parallel.data=2", "parallel.sequence=2"], 8, "start 4 ranks"),
        (["parallel.sequence=4", "parallel.shard=3"], 4, "use 2 or 4"),
        (["train.global_batch_tokens=100"], 1, "use 8192"),
        (["train.global_batch_tokens=20000", "train.micro_batch_size=2"], 1, "use 16384 or 32768"),
    ],
)
def test_refused_for_the_number_of_ranks(overrides, ranks, words):
    with pytest.raises(ValueError, match=words):
        resolve(compose(overrides), ranks)


def test_axes_fill_the_ranks():
    degrees = resolve(compose(["parallel.sequence=2", "parallel.tensor=2", "train.global_batch_tokens=65536"]), 8)
    assert dataclasses.astuple(degrees) == (2, 2, 2, 4, 4, 1)


def test_no_option_names_code():
    """C117: nothing in a config can say what to run."""
    with pytest.raises(ValueError):
        compose(["+model._target_=os.system"])


def test_every_option_is_read_somewhere():
    """An option that no code reads would be ignored in silence."""
    root = CONF.parent
    code = "".join(
        path.read_text()
        for folder in ("model", "parallel", "data", "training")
        for path in sorted((root / folder).rglob("*.py"))
    )
    schema = (CONF / "schema.py").read_text()
    code += "".join(re.findall(r"self\.\w+", schema))  # its properties
    code += (root / "train.py").read_text() + schema.partition("def register")[2]
    for section in dataclasses.fields(TrainConfig):
        kind = ContextStage if section.name == "context" else section.type
        for option in dataclasses.fields(kind):
            read = f'"{option.name}"' if section.name == "timeouts" else f".{option.name}"  # looked up by phase
            assert read in code, f"{section.name}.{option.name}"
