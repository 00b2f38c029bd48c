"""A ZeRO training engine in Rust, with the calls that DeepSpeed users write.

    import oxizero

    engine, optimizer, _, scheduler = oxizero.initialize(model=model, config="ds_config.json")
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Optimizer states and gradients are sharded over the ranks of one machine, as the configuration's
`zero_optimization.stage` says; in stage 3 the weights too, which are whole only while their module
runs. Ranks are started by `torchrun`; a plain `python` is a
world of one. `oxizero.utils` reads and writes whole gradients, master weights and optimizer states.
"""

from oxizero import utils, zero
from oxizero._oxizero import CommError, ConfigError, EngineError
from oxizero.engine import Engine
from oxizero.optimizer import Optimizer
from oxizero.splits import mark_expert, mark_split
from oxizero.start import initialize
from oxizero.world import init_distributed

__all__ = [
    "CommError",
    "ConfigError",
    "Engine",
    "EngineError",
    "Optimizer",
    "init_distributed",
    "initialize",
    "mark_expert",
    "mark_split",
    "utils",
    "zero",
]
