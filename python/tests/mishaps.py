"""A small engine, and a step of it."""

import torch
from torch import nn

import oxizero

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}


def made(model=None, **config):
    model = nn.Linear(2, 1, bias=False) if model is None else model
    nn.init.zeros_(next(model.parameters()))
    return oxizero.initialize(model=model, config=SGD | config)[0]


def train(engine, times=1):
    for _ in range(times):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
