"""Lion, with the arguments of DeepSpeed's `FusedLion` and `DeepSpeedCPULion`."""

import torch

from oxizero.ops.elementwise import Elementwise, only


class _Lion(Elementwise):
    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, param, grad, state, group):
        if not state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        average = state["exp_avg"]
        direction = (beta1 * average + (1 - beta1) * grad).sign()
        param.mul_(1 - lr * group["weight_decay"]).sub_(lr * direction)
        average.mul_(beta2).add_((1 - beta2) * grad)


class FusedLion(_Lion):
    """Lion; the second of DeepSpeed's betas is not the paper's, which is 0.99."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True
    ):
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(_Lion):
    """Lion; the second of DeepSpeed's betas is not the paper's, which is 0.99."""

    def __init__(
        self,
        model_params,
        lr=1e-3,
        betas=(0.9, 0.999),
        weight_decay=0,
        fp32_optimizer_states=True,
    ):
        only("fp32_optimizer_states", fp32_optimizer_states, True)
        super().__init__(model_params, lr, betas, weight_decay)
