"""`initialize`: from a model and a configuration to an engine."""

import logging

import torch

from oxizero import (
    backends,
    configuration,
    data,
    lr_schedules,
    optimizer as optimizers,
    pieces,
    splits,
    world,
)
from oxizero._oxizero import ConfigError
from oxizero.engine import Engine
from oxizero.log import log_dist, logger
from oxizero.meeting import Meeting
from oxizero.optimizer import Optimizer


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port=None,
    mpu=None,
    dist_init_required=None,
    collate_fn=None,
    config=None,
    mesh_param=None,
    config_params=None,
):
    """Makes an engine of a model; a collective call, after which weights and buffers are rank 0's.

    `config` is DeepSpeed's: a dict, or the path of a JSON file. `optimizer` is one of torch.optim's
    AdamW, Adam, SGD and Adagrad or of `oxizero.ops`, or a function that makes one of parameters;
    without it the configuration's is made, of `model_parameters` (parameters, or groups of them)
    or of all that are trained. `lr_scheduler` is a torch scheduler or one of
    `oxizero.lr_schedules`, or a function that makes one of the optimizer; without it the
    configuration's is made, if it has one. The engine advances it with each applied step. Returns
    `(engine, optimizer, dataloader, lr_scheduler)`.

    All ranks are data-parallel, but for what parameters say: see `oxizero.mark_split`. Ranks of a
    split work on the same micro-batches. `mesh_param` is a DeviceMesh whose dimensions marks may
    name; `mpu` is asked for the ranks that are tensor-parallel.
    """
    world.count_engine()
    meeting, told = Meeting(), None
    try:
        told = configuration.the_one(args, config, config_params)
        if model is None:
            raise ConfigError("initialize(model=...) is missing")
        if distributed_port not in (None, 29500):  # DeepSpeed's default
            raise ConfigError(
                f"initialize(distributed_port={distributed_port}) is refused: torchrun sets "
                "MASTER_PORT"
            )
        pieces.settle(model)
        arrangement = splits.arrange(model, mesh_param, mpu)
        read = configuration.read(told, arrangement.batch_ranks)
        client = _client(model, optimizer, model_parameters, read)
        _tell_untrained(model, client)
        wrapped = Optimizer(client)
        scheduler = _scheduler(wrapped, lr_scheduler, read)
        if read.log_level is not None:
            logger.setLevel(read.log_level)
        for note in read.notes:
            log_dist(note, ranks=[0], level=logging.WARNING)
        loader = data.loader(training_data, collate_fn, read, arrangement)
        engine = Engine(model, wrapped, read, arrangement, meeting, scheduler)
    except Exception as error:
        meeting.give_up(backends.likely(model, told), error)
        raise
    engine.training_dataloader = loader
    return engine, wrapped, loader, scheduler


def _client(model, optimizer, model_parameters, config):
    parameters = model_parameters
    if parameters is None:
        parameters = [param for param in model.parameters() if param.requires_grad]
    if isinstance(parameters, torch.Tensor):
        raise ConfigError("model_parameters is one tensor; give a list of parameters, or of groups")
    parameters = list(parameters)
    if optimizer is not None:
        _refuse_both("optimizer", config.optimizer)
        return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(parameters)
    if config.optimizer is None:
        raise ConfigError(
            "there is no optimizer; pass one to initialize(), or add `optimizer` to the "
            "configuration"
        )
    return optimizers.from_settings(config.optimizer, parameters)


def _tell_untrained(model, client):
    """Warns of gradients that nobody uses."""
    trained = {id(param) for group in client.param_groups for param in group["params"]}
    untrained = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and id(param) not in trained
    ]
    if untrained:
        log_dist(
            f"{len(untrained)} parameters, of which `{untrained[0]}` is one, want gradients and "
            "are in no group of the optimizer: they are not trained, and keep whole gradients in "
            "`param.grad`; requires_grad_(False) before initialize() saves those",
            ranks=[0],
            level=logging.WARNING,
        )


def _scheduler(optimizer, lr_scheduler, config):
    if lr_scheduler is not None:
        _refuse_both("scheduler", config.scheduler)
        return lr_scheduler(optimizer) if callable(lr_scheduler) else lr_scheduler
    if config.scheduler is None:
        return None
    return lr_schedules.from_settings(config.scheduler, optimizer)


def _refuse_both(name, settings):
    if settings is not None:
        raise ConfigError(
            f"initialize() was given one of its own, and the configuration has `{name}` too; leave "
            "one of the two out"
        )
