"""What DeepSpeed's optimizers have in common here."""

import torch

from oxizero._oxizero import ConfigError


class Elementwise(torch.optim.Optimizer):
    """An optimizer that updates each parameter by itself, with f32 states."""

    @torch.no_grad()
    def step(self, closure=None):
        """Updates the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad.float(), self.state[param], group)
        return loss

    def _update(self, param, grad, state, group):
        raise NotImplementedError


def only(name, value, works):
    """Refuses an argument that asks for what there is not."""
    if value != works:
        raise ConfigError(f"{name} = {value} is refused: there is no such update; use {works}")
