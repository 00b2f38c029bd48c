"""DeepSpeed's optimizers, by its names: `ops.adam`, `ops.lion` and `ops.adagrad`.

`initialize` takes their groups over, and the engine updates the weights. Without an engine they
are ordinary torch optimizers.
"""

from oxizero.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
