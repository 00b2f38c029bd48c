"""The update rules of `oxizero-optim`, on tensors.

Each is the formula of the native rule in the same order: every operation rounds to f32, none is
fused with the next, and what counts as zero does so here. Coefficients are worked out in f64.
"""

import math
import struct

import torch

from oxizero.torch_backend.device import at, blocks, scalar

# What counts as zero; see the documentation of `oxizero-optim`.
_TINY = 2.0**-100
_TINY_ROOT = 2.0**-58
_NORMAL = 2.0**-126


@torch.no_grad()
def update(group, hyper, scaled, weights):
    """Updates some elements of a parameter. `group` has the rule's settings by name, `hyper` the
    learning rate, the weight decay and the count of updates; `scaled` is the gradient, with what
    it is divided and then multiplied by; `weights` are the masters, the states and the model's
    weights, if they are others."""
    rule, (values, divisor, factor) = _RULES[group["rule"]], scaled
    master, states, model = weights
    tensors = [at(values), at(master), *map(at, states)]
    if model is not None:
        tensors.append(at(model))
    for grad, master, *others in blocks(*tensors):
        states = others[: len(states)]
        rule(group, hyper, _ready(grad, divisor, factor), master, *states)
        if model is not None:
            others[-1].copy_(master)


def _adamw(group, hyper, grad, master, first, second):
    lr, weight_decay, _ = hyper
    step = _adam_step(group, hyper, grad, first, second)
    master.mul_(1.0 - lr * weight_decay).sub_(step)


def _adam(group, hyper, grad, master, first, second):
    grad = _zero_below(_TINY, grad + master * hyper[1])
    master.sub_(_adam_step(group, hyper, grad, first, second))


def _adam_step(group, hyper, grad, first, second):
    """Advances the moments; what is to be subtracted from the weights."""
    (beta1, beta2), (lr, _, step) = group["betas"], hyper
    weight = _f32(1.0 - beta1)
    if weight < 0.5:
        first.add_((grad - first).mul_(weight))
    else:
        first.copy_(grad - (grad - first).mul_(1.0 - weight))
    _zero_below(_TINY, first)
    root = _zero_below(_TINY_ROOT, grad.clone())
    square = (root * (1.0 - beta2)).mul_(root)
    _zero_below(_NORMAL, second.mul_(beta2).add_(square))
    correction = math.sqrt(1.0 - beta2**step)
    denominator = (_sqrt(second) / scalar(correction, second)).add_(group["eps"])
    return (first * (lr / (1.0 - beta1**step))).div_(denominator)


def _sgd(group, hyper, grad, master, *buffers):
    lr, penalty, _ = hyper
    momentum = group["momentum"] or 0.0
    grad = _zero_below(_TINY, grad + master * penalty)
    if momentum != 0.0:
        (buffer,) = buffers
        _zero_below(_TINY, buffer.mul_(momentum).add_(grad))
        grad = grad + buffer * momentum if group["nesterov"] else buffer
    master.sub_(grad * lr)


def _lion(group, hyper, grad, master, average):
    (beta1, beta2), (lr, weight_decay, _) = group["betas"], hyper
    mixed = (average * beta1).add_(grad * (1.0 - beta1))
    # torch's sign of a NaN is 0.
    direction = torch.where(mixed.isnan(), mixed, mixed.sign())
    master.mul_(1.0 - lr * weight_decay).sub_(direction.mul_(lr))
    _zero_below(_TINY, average.mul_(beta2).add_(grad * (1.0 - beta2)))


def _adagrad(group, hyper, grad, master, total):
    lr, penalty, step = hyper
    grad = _zero_below(_TINY, grad + master * penalty)
    root = _zero_below(_TINY_ROOT, grad.clone())
    total.add_(root * root)
    lr = lr / (1.0 + (step - 1) * group["lr_decay"])
    master.sub_((grad * lr).div_(_sqrt(total).add_(group["eps"])))


_RULES = {"adamw": _adamw, "adam": _adam, "sgd": _sgd, "lion": _lion, "adagrad": _adagrad}


def _ready(grad, divisor, factor):
    """A new tensor of the gradient, divided and clipped."""
    floor = max(_f32(_TINY * divisor / factor), _NORMAL) if factor > 0.0 else math.inf
    grad = grad.to(torch.float32, copy=True)
    return _zero_below(floor, grad).div_(scalar(divisor, grad)).mul_(factor)


def _zero_below(floor, values):
    """The same tensor, with +0 where a magnitude is below the floor. A NaN stays."""
    return values.masked_fill_(values.abs() < floor, 0.0)


def _sqrt(values):
    """A new tensor of roots, correctly rounded: those of torch's f32 on the CPU are not."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()


def _f32(value):
    """A number as f32 holds it, and infinite where it holds none so large."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf
