"""A ZeRO training engine in Rust, with the calls that DeepSpeed users write.

    import oxizero

    engine, optimizer, _, scheduler = oxizero.initialize(model=model, config="ds_config.json")
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Optimizer states and gradients are sharded over ranks, as the configuration's
`zero_optimization.stage` says; in stage 3 the weights too, which are whole only while their module
runs. Ranks are started by `oxizero launch` or `torchrun`; a plain `python` is a world of one.
`oxizero.utils` reads and writes whole gradients, master weights and optimizer states.

`import oxizero as deepspeed` is what a script needs that was written for DeepSpeed: `ops`, `comm`,
`checkpointing`, `lr_schedules` and `accelerator` have its names.
"""

from oxizero import (
    accelerator,
    checkpointing,
    comm,
    lr_schedules,
    ops,
    runtime,
    utils,
    zero,
)
from oxizero._oxizero import CommError, ConfigError, EngineError, __version__
from oxizero.accelerator import get_accelerator
from oxizero.arguments import add_config_arguments
from oxizero.engine import Engine
from oxizero.log import log_dist, logger
from oxizero.optimizer import Optimizer
from oxizero.splits import mark_expert, mark_split
from oxizero.start import initialize
from oxizero.world import init_distributed

DeepSpeedEngine = Engine

# What scripts import of DeepSpeed that is not here, and what there is instead.
_ELSEWHERE = {
    "PipelineModule": "pipelines are not there; shard by `zero_optimization.stage`",
    "pipe": "pipelines are not there; shard by `zero_optimization.stage`",
    "moe": "write experts as modules of your own, and declare them by oxizero.mark_expert",
    "init_inference": "models are trained here; load what `oxizero convert` writes to serve them",
    "tp_model_init": "split layers yourself, and declare their parameters by oxizero.mark_split",
    "DeepSpeedConfig": "initialize(config=...) reads the configuration",
}


def __getattr__(name):
    advice = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module 'oxizero' has no attribute {name!r}{advice}")


__all__ = [
    "CommError",
    "ConfigError",
    "DeepSpeedEngine",
    "Engine",
    "EngineError",
    "Optimizer",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "lr_schedules",
    "mark_expert",
    "mark_split",
    "ops",
    "runtime",
    "utils",
    "zero",
]
