"""Composes a config from overrides without Hydra's command line: for `data.prepare`, tests and tools."""

from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf.schema import TrainConfig, explain, load, register


def compose(overrides: list[str]) -> TrainConfig:
    """The config that `python train.py OVERRIDES` would run.

    Raises:
        ValueError: for a mistyped key, a value of the wrong type, or a broken rule.
    """
    register()
    try:
        with initialize_config_dir(version_base=None, config_dir=str(Path(__file__).parent)):
            cfg = hydra_compose(config_name="train", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error)) from None
    return load(cfg)
