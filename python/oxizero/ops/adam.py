"""Adam and AdamW, with the arguments of DeepSpeed's `FusedAdam` and `DeepSpeedCPUAdam`."""

import math

import torch

from oxizero.ops.elementwise import Elementwise, only


class _Adam(Elementwise):
    def __init__(self, params, lr, betas, eps, weight_decay, decoupled):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": bool(decoupled),
        }
        super().__init__(params, defaults)

    def _update(self, param, grad, state, group):
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        state["step"] += 1
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        if group["decoupled_weight_decay"]:
            param.mul_(1 - lr * group["weight_decay"])
        else:
            grad = grad + group["weight_decay"] * param
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2 ** state["step"])
        step_size = lr / (1 - beta1 ** state["step"])
        param.sub_(step_size * state["exp_avg"] / (root + group["eps"]))


class FusedAdam(_Adam):
    """AdamW, or Adam where `adam_w_mode` is false."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
    ):
        only("bias_correction", bias_correction, True)
        only("amsgrad", amsgrad, False)
        super().__init__(params, lr, betas, eps, weight_decay, adam_w_mode)


class DeepSpeedCPUAdam(_Adam):
    """AdamW, or Adam where `adamw_mode` is false."""

    def __init__(
        self,
        model_params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        adamw_mode=True,
        fp32_optimizer_states=True,
    ):
        only("bias_correction", bias_correction, True)
        only("amsgrad", amsgrad, False)
        only("fp32_optimizer_states", fp32_optimizer_states, True)
        super().__init__(model_params, lr, betas, eps, weight_decay, adamw_mode)
