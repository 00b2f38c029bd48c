"""The configuration that calls are given: a dict, or the path of a JSON file."""

import json
import math
import os

from oxizero import _oxizero
from oxizero._oxizero import ConfigError


def the_one(args, *given):
    """The one configuration among `given` and in `args`."""
    path = getattr(args, "deepspeed_config", None)
    given = [config for config in (*given, path) if config is not None]
    if len(given) != 1:
        raise ConfigError(f"initialize() takes one configuration, and was given {len(given)}")
    return given[0]


def read(config, batch_ranks):
    """What it says, checked, for so many ranks with batches of their own."""
    return _oxizero.Config(_text(config), batch_ranks)


def fields(config):
    """Its fields, unchecked."""
    return config if isinstance(config, dict) else json.loads(_text(config))


def _text(config):
    if not isinstance(config, dict):
        if not isinstance(config, (str, os.PathLike)):
            raise ConfigError(f"config = {config!r}; give a dict, or the path of a JSON file")
        with open(config, encoding="utf-8") as file:
            return file.read()
    if config.get("steps_per_print") == math.inf:  # for never, which JSON has no number for
        config = {key: value for key, value in config.items() if key != "steps_per_print"}
    try:
        return json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the configuration is no JSON: {_culprit(config)}{error}") from None


def _culprit(config, prefix=""):
    """The field that JSON has no value for, as the beginning of a sentence."""
    for name, value in config.items():
        if isinstance(value, dict):
            if found := _culprit(value, f"{prefix}{name}."):
                return found
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return f"`{prefix}{name} = {value!r}`: "
    return ""
