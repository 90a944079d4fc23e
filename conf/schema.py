"""Every option, as dataclasses, with the rules that hold between them.

`train.yaml` lists `schema` first in its defaults, so a mistyped key in a preset or on the command line fails when Hydra
composes the config. `load` turns the composed tree into plain dataclasses, converts lengths such as `128K`, and checks
the rules between sections. Nothing here repairs a value or looks at the machine.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any, Union

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Length = Union[int, str]  # 131072, "128K" or "1M": binary multiples, converted by `load`


class Layout(StrEnum):
    """Which tokens of a sequence a rank of the ring holds; auto = what is fastest for the documents of each batch."""

    auto = "auto"
    contiguous = "contiguous"
    zigzag = "zigzag"
    striped = "striped"
    balanced = "balanced"
    grouped = "grouped"


class Route(StrEnum):
    """How keys and values reach the ranks that need them: round a ring of neighbours, straight from their owners,
    or gathered, some heads at a time; auto = what is fastest for the documents of each batch."""

    auto = "auto"
    relay = "relay"
    direct = "direct"
    gather = "gather"


class Kernel(StrEnum):
    """Which implementation computes a tile of attention."""

    auto = "auto"
    reference = "reference"
    sdpa = "sdpa"
    flash = "flash"


class GradientWire(StrEnum):
    """The dtype in which gradients of keys and values travel: that of accumulation, or (route=direct) bfloat16."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class ReduceGradients(StrEnum):
    """When gradients are summed over the gradient axis: once a step (faster), or at each micro-batch (less memory)."""

    last = "last"
    each = "each"


class Dtype(StrEnum):
    """auto = bfloat16 where `cluster.device` is cuda, else float32; `load` settles which."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


class Device(StrEnum):
    """What a cluster's ranks compute on."""

    cpu = "cpu"
    cuda = "cuda"


class Recompute(StrEnum):
    """What a layer keeps for its backward: everything, its input and attention's (out, lse), or its input only."""

    none = "none"
    block = "block"
    full = "full"


class Schedule(StrEnum):
    """Warm-up then cosine to the floor, or warm-up, a constant, and a linear decay over the last steps."""

    cosine = "cosine"
    wsd = "wsd"


class Source(StrEnum):
    """Where documents come from: prepared from the packages on this machine, from text, or there as tokens already."""

    packages = "packages"
    text = "text"
    tokens = "tokens"


class Unit(StrEnum):
    """What one document of a folder of text is: each file, or each folder right below `data.path` with all it holds."""

    file = "file"
    folder = "folder"


class Long(StrEnum):
    """A document longer than a sequence goes on in the next one, or is cut into windows dealt like documents."""

    consecutive = "consecutive"
    windows = "windows"


class Short(StrEnum):
    """Shorter documents lie end to end, cut where a sequence ends, or go whole to where they fit best."""

    pack = "pack"
    fit = "fit"


class Positions(StrEnum):
    """What rotary positions count from: the start of each document (of the part in this sequence), or the sequence."""

    document = "document"
    sequence = "sequence"


class Wandb(StrEnum):
    disabled = "disabled"
    offline = "offline"
    online = "online"


MOST_TIMES = 1000  # that a document may come in an epoch
ATTENTION_KINDS = ("full", "window", "full_norope", "window_norope")


@dataclass(kw_only=True)
class ModelConfig:
    """Shape of a Llama-family decoder."""

    name: str = MISSING
    vocab_size: int = MISSING
    model_dim: int = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING
    ffn_dim: int = MISSING
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_pattern: str = "full"  # kinds of ATTENTION_KINDS, repeated over the layers
    attention_window: int = 0  # tokens a window layer sees, itself included; 0 where no layer has a window
    init_std: float = 0.02
    vocab_multiple: int = 1  # rows of embedding and head are padded to a multiple of this; no padded row is predicted
    z_loss: float = 0.0  # weight of the mean of log(sum of exp(logits))² in the training loss; 0 = without
    ffn_block_tokens: Length | None = None  # per block of the feed-forward; null = what cluster.block_bytes allows
    loss_block_tokens: Length | None = None  # per block of logits; null = what cluster.block_bytes allows

    @property
    def padded_vocab_size(self) -> int:
        """Rows of embedding and head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def attention_kinds(self) -> list[str]:
        """The kind of each layer, in order."""
        pattern = [kind.strip() for kind in self.attention_pattern.split(",")]
        return [pattern[i % len(pattern)] for i in range(self.num_layers)]


@dataclass(kw_only=True)
class ParallelConfig:
    """How ranks divide the work: data × sequence × tensor = number of ranks."""

    data: int = -1  # ranks with different sequences; -1 = what remains
    sequence: int = 1  # ranks that share one sequence, split by tokens; attention rings over them
    ulysses: int = 1  # of these, ranks that exchange tokens for heads before the ring, a divisor of sequence
    tensor: int = 1  # ranks that share each weight matrix
    shard: int = -1  # ranks over which states are sharded, a divisor of data × sequence; -1 = all of them
    layout: Layout = Layout.auto
    route: Route = Route.auto
    prefetch: int = 0  # exchanges under way ahead of the hop that is computed, route=direct; 0 = what is fastest
    # Keys and values of others that a rank holds at once, in blocks of a rank; in backward their gradients take as much
    # room again, in float32.
    buffer_blocks: int = 8
    gradient_wire: GradientWire = GradientWire.float32
    kernel: Kernel = Kernel.auto
    tensor_shards_activations: bool = True  # between its regions a rank keeps 1/tensor of the tokens
    reduce_gradients: ReduceGradients = ReduceGradients.last


@dataclass(kw_only=True)
class ClusterConfig:
    """What the machines can do, which `auto` and `plan.py` reckon with. Rates are what is reached, not what data sheets
    say; `benchmarks/calibrate.py NAME` measures them and writes `conf/cluster/NAME.yaml`."""

    name: str = MISSING
    device: Device = MISSING
    node_gpus: int = MISSING  # ranks of one node
    node_nics: int = MISSING  # network cards of one node that ranks share
    link_bytes_per_second: float = MISSING  # inside a node, of one rank, one direction
    nic_bytes_per_second: float = MISSING  # between nodes, of one network card, one direction
    latency_seconds: float = MISSING  # of one message
    attention_forward_flops: float = MISSING  # FLOP/s of the attention kernel on one rank
    attention_backward_flops: float = MISSING
    linear_flops: float = MISSING  # FLOP/s of large matrix products on one rank
    peak_flops: float = MISSING  # FLOP/s of one rank's data sheet, of which MFU is a share
    memory_bytes_per_second: float = MISSING  # of one rank's own memory
    memory_bytes: float = MISSING  # of one rank, all of it
    runtime_bytes: float = MISSING  # of these, what is taken before the first tensor: context, libraries, channels
    host_bytes_per_second: float = MISSING  # between one rank and its host's memory, one direction
    host_memory_bytes: float = MISSING  # of one node
    disk_bytes_per_second: float = MISSING  # checkpoints, of one node
    block_bytes: Length = MISSING  # for one block of the feed-forward or of logits, where their tokens are not set


@dataclass(kw_only=True)
class DataConfig:
    """Corpora, how they are prepared, and how they are cut into sequences."""

    source: Source = MISSING
    name: str = MISSING  # prepared data lies in <root>/<name>/{train,validation}
    root: str = "corpora"  # a folder; to train from, also an fsspec URL, such as s3://bucket/corpora
    mixture: str | None = (
        None  # books:0.7,code:0.3 = corpora below root, by shares of the tokens; null = the one of name
    )
    path: str | None = (
        None  # source=text: file or folder of text; source=tokens: shards, or a Megatron pair, to train on
    )
    validation_path: str | None = None  # source=tokens: the same, held out

    # How `data.prepare` makes a corpus of text:
    unit: Unit = Unit.file
    text_field: str = "text"  # of .jsonl and .parquet records
    origin: str | None = None  # where the text is from, for the manifest
    licence: str | None = None  # of the text, for the manifest
    validation_fraction: float = 0.05  # share of the documents held out, chosen by hash
    validation_names: str | None = None  # instead: patterns of the names held out, such as networkx,*/test_*
    tokenizer: str = "bpe"  # bpe or unigram = trained on the training documents; or a .model or tokenizer.json to use
    vocab_size: int = 8192  # pieces of a tokenizer that is trained
    end_token: str | None = None  # ends documents where data.tokenizer is a file; null = the one it is known to have
    workers: int = 0  # processes that tokenize; 0 = one for each CPU
    shard_tokens: Length = "1G"  # after which the next document opens another shard

    # How it is cut into sequences:
    sequence_length: Length = 8192  # global tokens of one sequence
    long: Long = Long.consecutive
    short: Short = Short.pack
    upweight: str | None = None  # 32K:2,128K:4 = documents of so many tokens or more come so often in an epoch
    positions: Positions = Positions.document
    balance: bool = True  # deal the sequences of a step to data ranks and micro-batches by their cost
    cache: str = ".cache"  # where root or path is a URL: a folder on this machine for what was fetched
    cache_bytes: Length = "64G"  # it takes up at most


@dataclass(kw_only=True)
class ContextStage:
    """A stretch of the run with its own sequence length; the last one may leave `tokens` out and go on to the end."""

    tokens: Length | None = None  # of the stage, a whole number of steps
    sequence_length: Length = MISSING
    rope_theta: float | None = None  # null = model.rope_theta


@dataclass(kw_only=True)
class TrainSection:
    steps: int = 100
    seed: int = 0
    global_batch_tokens: Length | None = None  # per step, over all ranks; null = one micro-batch per data rank
    micro_batch_size: int = 1  # sequences a data rank computes at once
    dtype: Dtype = Dtype.auto  # of compute; bfloat16 keeps float32 master weights
    recompute: Recompute = Recompute.block
    offload: bool = False  # keep what recompute keeps in the host's memory (GPUs only)
    log_every: int = 1  # steps between lines of the log; metrics.jsonl has every step
    # Steps in a row that may be skipped because loss or gradient is not finite; one more ends the run. 0 = none.
    max_skipped_steps: int = 3


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW."""

    learning_rate: float = 3e-4
    final_learning_rate_ratio: float = 0.1  # floor of the schedule, as a share of learning_rate
    schedule: Schedule = Schedule.cosine
    warmup_steps: int = 10
    decay_steps: int = 0  # schedule=wsd: steps of the final decay
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # not on norms and biases
    clip_norm: float = 1.0  # largest global gradient norm; 0 = no clipping


@dataclass(kw_only=True)
class ValidationConfig:
    every: int = 50  # steps between validations; 0 = at the end only
    sequences: int = 4  # of each source's held-out documents, at the stage's length; 0 = all of them


@dataclass(kw_only=True)
class CheckpointConfig:
    # Steps between checkpoints; null = as often as pays, by what a save costs and run.mtbf_hours; 0 = no interval. The
    # last step always writes one.
    every: int | None = None
    keep: int = 3  # newest checkpoints to keep; 0 = all
    keep_every: int = 0  # checkpoints of steps that this divides stay, too; 0 = none
    background: bool = False  # write while training goes on, from a copy in the host's memory


@dataclass(kw_only=True)
class TimeoutConfig:
    """Seconds that a rank may be in one phase of a run. Longer is a stall: it is reported, and ends the run."""

    start_seconds: int = 1800  # meeting the others; reading corpora, and a checkpoint
    first_step_seconds: int = 1800  # compiles, allocates, opens connections
    step_seconds: int = 600  # one micro-batch, its data included
    save_seconds: int = 1800  # one checkpoint
    validate_seconds: int = 600  # one micro-batch of held-out documents

    def longest(self) -> int:
        """Seconds after which a collective fails by itself, whatever its phase: later than any stall is reported."""
        return max(dataclasses.asdict(self).values()) + 60


@dataclass(kw_only=True)
class RunConfig:
    name: str = "default"
    dir: str = "runs"
    rehearse: str | None = None  # "256:17" = two steps as rank 17 of 256, alone: on a CPU without memory or arithmetic
    resume: str = "auto"  # auto = the newest whole checkpoint of this run; never; or the path of a checkpoint
    # From SIGTERM or SIGUSR1 until the kill that will follow (Slurm: KillWait, 30 by default): a save must fit into it.
    grace_seconds: float = 25.0
    heartbeat_seconds: float = 10.0  # between the signs of life that a rank leaves in the run's folder
    mtbf_hours: float | None = None  # mean time between failures of the whole run; null = 50,000 hours of one rank
    memory_history: bool = False  # CUDA: record allocations, for the report that running out of memory leaves


@dataclass(kw_only=True)
class LoggingConfig:
    wandb: Wandb = Wandb.disabled
    wandb_project: str = "longhaul"
    peak_flops: float | None = None  # of one rank; null = its data sheet, or a matmul timed at start
    ranks_every: int = 50  # steps between lines on the slowest rank of each phase; 0 = never


@dataclass(kw_only=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    context: list[ContextStage] = field(default_factory=list)  # sequence lengths in turn; empty = data.sequence_length
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    run: RunConfig = field(default_factory=RunConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def register() -> None:
    """Makes the schema known to Hydra, under the name that `train.yaml` lists first."""
    ConfigStore.instance().store(name="schema", node=TrainConfig)


def load(cfg: DictConfig) -> TrainConfig:
    """The composed config as dataclasses, lengths converted, rules checked.

    Raises:
        ValueError: naming key, value, rule and the nearest legal choice.
    """
    try:
        # A key added with '+' walks past the schema during composition; merging onto the schema once more refuses it.
        plain = OmegaConf.to_container(cfg, resolve=True)
        for number, stage in enumerate(plain.get("context") or []):
            if stage.get("sequence_length", MISSING) == MISSING:
                raise ValueError(f"context.{number}.sequence_length is not set: write it like 128K")
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), plain)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from None
    assert isinstance(config, TrainConfig)
    config.data.sequence_length = parse_length("data.sequence_length", config.data.sequence_length)
    config.data.shard_tokens = parse_length("data.shard_tokens", config.data.shard_tokens)
    config.data.cache_bytes = parse_length("data.cache_bytes", config.data.cache_bytes, "bytes")
    for number, stage in enumerate(config.context):
        stage.sequence_length = parse_length(f"context.{number}.sequence_length", stage.sequence_length)
        if stage.tokens is not None:
            stage.tokens = parse_length(f"context.{number}.tokens", stage.tokens)
    config.cluster.block_bytes = parse_length("cluster.block_bytes", config.cluster.block_bytes, "bytes")
    for name in ("ffn_block_tokens", "loss_block_tokens"):
        if getattr(config.model, name) is not None:
            setattr(config.model, name, parse_length(f"model.{name}", getattr(config.model, name)))
    if config.train.dtype is Dtype.auto:
        config.train.dtype = Dtype.bfloat16 if config.cluster.device is Device.cuda else Dtype.float32
    if config.train.global_batch_tokens is not None:
        config.train.global_batch_tokens = parse_length("train.global_batch_tokens", config.train.global_batch_tokens)
    check(config)
    return config


def explain(error: Exception) -> str:
    """One message for a composition error, with the nearest existing key where one was mistyped."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    if error.__cause__ is not None and str(error.__cause__).strip():
        message = message.rstrip(".") + ". " + str(error.__cause__).strip().splitlines()[0]
    if any(sign in message for sign in ("expecting", "token recognition", "LexerNoViable", "Ambiguous value")):
        message += ". Quote values that hold = , [ ] ( ) ~ or quotes, inside the shell's quotes: 'data.path=\"/a/b=c\"'"
    if "Could not find '" in message:
        options = [line for line in lines[1:] if "search path" not in line.lower() and "provider=" not in line]
        message += ". " + " ".join(options)
    quoted = message.split("'")[1] if message.count("'") > 1 else ""
    wrong = quoted if "." in quoted else getattr(error, "full_key", None) or quoted
    if wrong and "not in" in message:
        message = message if wrong in message else f"{wrong}: {message}"
        leaf = [key for key in keys() if key.split(".")[-1] == wrong.split(".")[-1]]
        known = keys()
        if "not in 'ContextStage'" in message:
            wrong, leaf = message.split("Key '")[1].split("'")[0], []
            known = [entry.name for entry in dataclasses.fields(ContextStage)]
        near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6) or leaf
        if near:
            message += f". Did you mean {near[0]}?"
    return message


def keys(node: Any = TrainConfig, prefix: str = "") -> list[str]:
    """Every key of the schema, dotted."""
    names = []
    for entry in dataclasses.fields(node):
        name = prefix + entry.name
        names.append(name)
        if dataclasses.is_dataclass(entry.type):  # stages of context have no keys of their own
            names += keys(entry.type, name + ".")
    return names


def settings(config: TrainConfig) -> dict[str, str]:
    """Every option by its dotted key, as text."""
    sections = dataclasses.asdict(config)
    context = {"context": str(sections.pop("context"))}
    return context | {
        f"{section}.{name}": str(value) for section, options in sections.items() for name, value in options.items()
    }


def stages(config: TrainConfig) -> list[TrainConfig]:
    """The config of each stage of `context`, with its sequence length and rope; [config] where there are none."""
    return [
        dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, sequence_length=stage.sequence_length),
            model=dataclasses.replace(config.model, rope_theta=stage.rope_theta or config.model.rope_theta),
        )
        for stage in config.context
    ] or [config]


def longest_stage(config: TrainConfig) -> TrainConfig:
    """The config of the stage whose sequences are longest: of all stages it needs most."""
    return max(stages(config), key=lambda stage: int(stage.data.sequence_length))


def tokens_per_step(config: TrainConfig, degrees: "Degrees") -> int:
    """Of all ranks; `degrees` are those of the same stage."""
    sequences = degrees.accumulation * degrees.data * config.train.micro_batch_size
    return sequences * int(config.data.sequence_length)


def mixture(text: str | None) -> dict[str, Fraction]:
    """Name and share of each corpus of `data.mixture`, exactly; {} for None.

    Raises:
        ValueError: where it is not written like books:0.7,code:0.3, or the shares do not sum to 1.
    """
    shares: dict[str, Fraction] = {}
    for part in text.split(",") if text else []:
        name, _, number = part.strip().rpartition(":")
        try:
            share = Fraction(number.strip())
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not name or name in shares or share <= 0 or any(sign in name for sign in ":; "):
            raise ValueError(
                f"data.mixture={text}: {part.strip()!r} is not NAME:SHARE, like books:0.7 or books:2/3, once"
            )
        shares[name] = share
    total = sum(shares.values())
    if shares and total != 1:
        legal = ",".join(f"{name}:{share / total}" for name, share in shares.items())
        raise ValueError(f"data.mixture={text}: the shares sum to {float(total):.6g}, not 1: use for example {legal}")
    return shares


def upweights(text: str | None) -> list[tuple[int, int]]:
    """(tokens, times) of `data.upweight`, shortest first; [] for None.

    Raises:
        ValueError: where it is not written like 32K:2,128K:4.
    """
    steps: dict[int, int] = {}
    for part in text.split(",") if text else []:
        length, colon, times = part.strip().partition(":")
        if not colon or not times.isdecimal() or not 1 <= int(times) <= MOST_TIMES:
            raise ValueError(
                f"data.upweight={text}: {part.strip()!r} is not LENGTH:TIMES, write it like 32K:2,128K:4, up to "
                f"{MOST_TIMES} times"
            )
        tokens = parse_length("data.upweight", length)
        if tokens in steps:
            raise ValueError(
                f"data.upweight={text} says twice how often documents of {length} tokens come: say it once"
            )
        steps[tokens] = int(times)
    return sorted(steps.items())


def parse_length(key: str, value: Length, unit_name: str = "tokens") -> int:
    """A number of tokens or bytes, with K, M and G as binary multiples."""
    text = str(value).strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"{key}={value} is not a positive number of {unit_name}: write it like 8192, 128K or 1M")
    return int(digits) * unit


def nearest_divisors(number: int, wish: int) -> str:
    """The divisors of `number` next to `wish`, in words."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wish][-1:]
    above = [d for d in divisors if d > wish][:1]
    return " or ".join(str(d) for d in below + above)


def check(config: TrainConfig) -> None:
    """The rules that hold whatever the number of ranks.

    Raises:
        ValueError: at the first rule that is broken.
    """
    _check_ranges(config)
    _check_model(config.model)
    _check_tensor(config)
    _check_ring(config)
    _check_data(config)
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.schedule is Schedule.wsd and not 1 <= optimizer.decay_steps <= steps - optimizer.warmup_steps:
        raise ValueError(
            f"optimizer.decay_steps={optimizer.decay_steps} does not fit optimizer.schedule=wsd: between warm-up "
            f"and train.steps={steps} there is room for 1 to {max(1, steps - optimizer.warmup_steps)}"
        )


def _check_data(config: TrainConfig) -> None:
    """Mixture, stages, and what each source asks for."""
    data = config.data
    upweights(data.upweight)
    if data.mixture and data.source is Source.tokens:
        raise ValueError("data.mixture is of corpora below data.root: leave it out with data.source=tokens")
    for name in mixture(data.mixture):
        _check_folder("data.mixture", name)
    for number, stage in enumerate(config.context):
        if stage.tokens is None and number < len(config.context) - 1:
            raise ValueError(
                f"context.{number}.tokens is not set: only the last stage goes on to the end, give the others a number"
            )
        if stage.rope_theta is not None and not 0 < stage.rope_theta < math.inf:
            raise ValueError(f"context.{number}.rope_theta={stage.rope_theta} must be a number above 0")


def _check_tensor(config: TrainConfig) -> None:
    """The tensor axis cuts heads, feed-forward and vocabulary into equal parts."""
    model, tensor = config.model, config.parallel.tensor
    cut = {name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "ffn_dim", "padded_vocab_size")}
    for name, number in cut.items():
        if number % tensor:
            # A choice that divides all four, so that the next error is not about another of them.
            raise ValueError(
                f"parallel.tensor={tensor} does not divide model.{name}={number}: use "
                f"{nearest_divisors(math.gcd(*cut.values()), tensor)}"
            )


def _check_ring(config: TrainConfig) -> None:
    """What layout, route, Ulysses and the wire can do together."""
    parallel, model = config.parallel, config.model
    if parallel.sequence % parallel.ulysses:
        raise ValueError(
            f"parallel.ulysses={parallel.ulysses} does not divide parallel.sequence={parallel.sequence}: use "
            f"{nearest_divisors(parallel.sequence, parallel.ulysses)}"
        )
    check_ulysses(model.num_heads // parallel.tensor, model.num_kv_heads // parallel.tensor, parallel.ulysses)
    if parallel.prefetch and parallel.route is not Route.direct:
        raise ValueError(
            f"parallel.prefetch={parallel.prefetch} needs parallel.route=direct, not {parallel.route}: use "
            "parallel.prefetch=0"
        )
    if parallel.gradient_wire is GradientWire.bfloat16:
        if parallel.route is not Route.direct:
            raise ValueError(
                f"parallel.gradient_wire=bfloat16 needs parallel.route=direct, not {parallel.route}: on the other "
                "routes gradients add up on the way, which bfloat16 would round at each rank"
            )
        if config.train.dtype is not Dtype.bfloat16:
            raise ValueError(
                f"parallel.gradient_wire=bfloat16 with train.dtype={config.train.dtype}: use train.dtype=bfloat16, or "
                "parallel.gradient_wire=float32"
            )


def check_ulysses(num_heads: int, num_kv_heads: int, degree: int) -> None:
    """Each rank of the exchange gets equally many query heads, and the key/value heads that these see.

    Raises:
        ValueError: naming the nearest degrees that work.
    """

    def fits(u: int) -> bool:
        return u > 0 and num_heads % u == 0 and (num_kv_heads % u == 0 or u % num_kv_heads == 0)

    if not fits(degree):
        legal = [u for u in range(1, num_heads + 1) if fits(u)]
        near = [u for u in legal if u < degree][-1:] + [u for u in legal if u > degree][:1]
        raise ValueError(
            f"parallel.ulysses={degree} cannot share {num_heads} query heads and {num_kv_heads} key/value heads of a "
            f"rank: use {' or '.join(map(str, near))}"
        )


def _check_ranges(config: TrainConfig) -> None:
    model, optimizer, train = config.model, config.optimizer, config.train
    counts = {
        "parallel.sequence": config.parallel.sequence,
        "parallel.tensor": config.parallel.tensor,
        "parallel.ulysses": config.parallel.ulysses,
        "parallel.buffer_blocks": config.parallel.buffer_blocks,
        "cluster.node_gpus": config.cluster.node_gpus,
        "cluster.node_nics": config.cluster.node_nics,
        "data.vocab_size": config.data.vocab_size,
        "train.steps": train.steps,
        "train.micro_batch_size": train.micro_batch_size,
        "train.log_every": train.log_every,
    } | {f"timeouts.{name}": seconds for name, seconds in dataclasses.asdict(config.timeouts).items()}
    for key, value in counts.items():
        if value < 1:
            raise ValueError(f"{key}={value} must be positive: use 1 or more")
    natural = {
        "validation.every": config.validation.every,
        "validation.sequences": config.validation.sequences,
        "checkpoint.every": config.checkpoint.every or 0,
        "checkpoint.keep": config.checkpoint.keep,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "train.max_skipped_steps": train.max_skipped_steps,
        "logging.ranks_every": config.logging.ranks_every,
        "parallel.prefetch": config.parallel.prefetch,
        "data.workers": config.data.workers,
        "optimizer.warmup_steps": optimizer.warmup_steps,
        "optimizer.decay_steps": optimizer.decay_steps,
    }
    for key, value in natural.items():
        if value < 0:
            raise ValueError(f"{key}={value} must not be negative: use 0 or more")
    for key, value, limit in (
        ("train.seed", train.seed, (1 << 63) - 1),
        *((f"timeouts.{name}", seconds, 10**8) for name, seconds in dataclasses.asdict(config.timeouts).items()),
    ):
        if not 0 <= value <= limit:
            raise ValueError(f"{key}={value} is out of range: use 0 to {limit}")
    # Comparisons with NaN are false, so each range is asked for as what must hold.
    positive = {
        "optimizer.learning_rate": optimizer.learning_rate,
        "optimizer.eps": optimizer.eps,
        "model.norm_eps": model.norm_eps,
        "model.rope_theta": model.rope_theta,
        "model.init_std": model.init_std,
    }
    rates = (
        "link_bytes_per_second",
        "nic_bytes_per_second",
        "attention_forward_flops",
        "attention_backward_flops",
        "linear_flops",
        "peak_flops",
        "memory_bytes_per_second",
        "memory_bytes",
        "host_bytes_per_second",
        "host_memory_bytes",
        "disk_bytes_per_second",
    )
    positive |= {f"cluster.{name}": getattr(config.cluster, name) for name in rates}
    positive |= {
        "run.grace_seconds": config.run.grace_seconds,
        "run.heartbeat_seconds": config.run.heartbeat_seconds,
    }
    if config.run.mtbf_hours is not None:
        positive["run.mtbf_hours"] = config.run.mtbf_hours
    if config.logging.peak_flops is not None:
        positive["logging.peak_flops"] = config.logging.peak_flops
    for key, value in positive.items():
        if not 0 < value < math.inf:
            default = _default(key)
            usual = "" if default == MISSING else f": its default is {default}"
            raise ValueError(f"{key}={value} must be a number above 0{usual}")
    for key, value in {
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.clip_norm": optimizer.clip_norm,
        "cluster.latency_seconds": config.cluster.latency_seconds,
        "cluster.runtime_bytes": config.cluster.runtime_bytes,
        "model.z_loss": model.z_loss,
    }.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{key}={value} must not be negative: use 0 to do without")
    for key, value in {"beta1": optimizer.beta1, "beta2": optimizer.beta2}.items():
        if not 0 <= value < 1:
            raise ValueError(f"optimizer.{key}={value} must be at least 0 and below 1: {_default('optimizer.' + key)}")
    for key, value in {"parallel.data": config.parallel.data, "parallel.shard": config.parallel.shard}.items():
        if value < 1 and value != -1:
            raise ValueError(f"{key}={value} must be positive, or -1 for what remains")
    shares = {
        "optimizer.final_learning_rate_ratio": config.optimizer.final_learning_rate_ratio,
        "data.validation_fraction": config.data.validation_fraction,
    }
    for key, value in shares.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{key}={value} is a share: use a number between 0 and 1")
    _check_folder("run.name", config.run.name)
    _check_folder("data.name", config.data.name)


def _check_folder(key: str, value: str) -> None:
    if not value or "/" in value or value.startswith("."):
        raise ValueError(f"{key}={value!r} must name one folder: no '/', no leading '.'")


def _default(key: str) -> Any:
    """The default of a dotted key of the schema."""
    section, name = key.split(".")
    return getattr(getattr(TrainConfig(), section), name)


def _check_model(model: ModelConfig) -> None:
    heads = ("num_heads", "num_kv_heads", "head_dim")
    sizes = ("vocab_size", "vocab_multiple", "model_dim", "num_layers", *heads, "ffn_dim")
    for name in sizes:
        if getattr(model, name) < 1:
            raise ValueError(f"model.{name}={getattr(model, name)} must be positive: use 1 or more")
    if model.num_heads % model.num_kv_heads:
        raise ValueError(
            f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads={model.num_heads}: use "
            f"{nearest_divisors(model.num_heads, model.num_kv_heads)}"
        )
    if model.head_dim % 2:
        raise ValueError(
            f"model.head_dim={model.head_dim} must be even, rotary positions turn pairs: use {model.head_dim + 1}"
        )
    for kind in model.attention_kinds():
        if kind not in ATTENTION_KINDS:
            near = difflib.get_close_matches(kind, ATTENTION_KINDS, n=1) or ATTENTION_KINDS[:1]
            raise ValueError(
                f"model.attention_pattern={model.attention_pattern} has the unknown kind {kind!r}: did you mean "
                f"{near[0]}? Kinds are {', '.join(ATTENTION_KINDS)}"
            )
    windowed = any(kind.startswith("window") for kind in model.attention_kinds())
    if windowed and model.attention_window < 1:
        raise ValueError(
            f"model.attention_window={model.attention_window} but model.attention_pattern={model.attention_pattern} "
            "has window layers: use 1 or more tokens"
        )
    if model.attention_window and not windowed:
        raise ValueError(
            f"model.attention_window={model.attention_window} but no layer of model.attention_pattern="
            f"{model.attention_pattern} has a window: use 0, or add 'window' to the pattern"
        )


@dataclass(frozen=True)
class Degrees:
    """Sizes of the axes once the number of ranks is known; `accumulation` is micro-batches per step."""

    data: int
    sequence: int
    tensor: int
    shard: int
    accumulation: int
    ulysses: int = 1

    @property
    def world(self) -> int:
        return self.data * self.sequence * self.tensor


def axes(config: TrainConfig, world_size: int) -> Degrees:
    """Sizes of the axes alone, whatever the batch: as if a step were one micro-batch. Raises ValueError."""
    return resolve(
        dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_tokens=None)), world_size
    )


def resolve(config: TrainConfig, world_size: int) -> Degrees:
    """Sizes of all axes for `world_size` ranks.

    Raises:
        ValueError: where data × sequence × tensor cannot be the number of ranks, `shard` does not divide the gradient
            axis, or the batch is not a whole number of micro-batches.
    """
    parallel, train, length = config.parallel, config.train, int(config.data.sequence_length)
    inner = parallel.sequence * parallel.tensor
    data = parallel.data if parallel.data > 0 else max(1, world_size // inner)
    if data * inner != world_size:
        raise ValueError(
            f"parallel.data={parallel.data} × parallel.sequence={parallel.sequence} × parallel.tensor="
            f"{parallel.tensor} does not make {world_size} ranks: start {data * inner} ranks, or use axes whose "
            f"product is {world_size}"
        )
    gradient = data * parallel.sequence
    shard = parallel.shard if parallel.shard > 0 else gradient
    if gradient % shard:
        raise ValueError(
            f"parallel.shard={shard} does not divide data × sequence = {gradient}: use "
            f"{nearest_divisors(gradient, shard)}"
        )
    micro = train.micro_batch_size * data * length
    tokens = micro if train.global_batch_tokens is None else int(train.global_batch_tokens)
    if tokens % micro:
        legal = [multiple * micro for multiple in (tokens // micro, tokens // micro + 1) if multiple]
        raise ValueError(
            f"train.global_batch_tokens={tokens} is not a multiple of train.micro_batch_size × data × "
            f"data.sequence_length = {micro}: use {' or '.join(map(str, legal))}"
        )
    return Degrees(data, parallel.sequence, parallel.tensor, shard, tokens // micro, parallel.ulysses)
