"""The engine that `initialize` returns: a module that trains."""

import contextlib
import logging
import weakref

import torch

from oxizero import _oxizero, backends, buffers, guard, pieces, registry, units, world
from oxizero._oxizero import EngineError
from oxizero.checkpoints import Checkpoints
from oxizero.later import Later
from oxizero.log import log_dist
from oxizero.lr_schedules import check_metrics
from oxizero.model_files import ModelFiles
from oxizero.optimizer import groups, set_options
from oxizero.passes import Passes
from oxizero.settings import Settings
from oxizero.sharded import Sharded
from oxizero.splits import local, local_grad
from oxizero.torch_calls import TorchCalls, unwatch, watch
from oxizero.weights import Weights


class _Scaled(torch.autograd.Function):
    """Multiplies a loss, and tells in backward that the gradients are so multiplied."""

    @staticmethod
    def forward(ctx, loss, passes, scale):
        ctx.passes, ctx.scale = passes, scale
        return loss * scale

    @staticmethod
    def backward(ctx, grad):
        ctx.passes.scaled(ctx.scale)
        return grad * ctx.scale, None, None


class _Destroyed:
    """What is left of an engine."""

    def __getattr__(self, name):
        raise EngineError("the engine was destroyed; initialize() makes another one of its model")


class Engine(Checkpoints, Later, ModelFiles, Settings, TorchCalls, torch.nn.Module):
    """A model, its optimizer, and the ranks that train it together.

    A micro-batch is a forward, a backward (`engine.backward(loss)` or `loss.backward()`) and a
    `step()`; the step that ends the window of `gradient_accumulation_steps` micro-batches updates
    the weights. All ranks call the same in the same order.
    """

    def __init__(self, module, optimizer, config, arrangement, meeting, lr_scheduler=None):
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.config = config
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = None
        self.micro_steps = 0
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._passes = Passes()
        self._forced_boundary = None
        # How many `no_sync` there are around what runs.
        self._unsynced = 0
        self._accumulated = 0
        self._has_applied = False
        self._norm = None
        self._place = world.place()
        # Ranks that have micro-batches of their own.
        self.dp_world_size = arrangement.batch_ranks
        registry.check_free(module)
        self._back_end = backends.choose(module, config)
        self._weights = Weights(module, optimizer, config.model_dtype)
        found = units.find(module, config.leaf_modules) if config.stage == 3 else []
        held = []
        if self._place.size > 1:
            held = buffers.check(self._back_end, module, self._weights.others)
        described = self._weights.described(units.numbers(found), self._back_end)
        groups_of_optimizer = groups(optimizer)
        self._core = _oxizero.Engine(
            (config, arrangement),
            self._back_end,
            described,
            groups_of_optimizer,
            lambda: meeting.meet(self._back_end),
        )
        del described
        self._sharded, self._hooks = None, []
        try:
            self._take_model(found, held)
        except Exception as error:
            self._give_model_back(error)
            raise
        optimizer.engine = self
        watch(self)

    def forward(self, *args, **kwargs):
        """The model's forward."""
        self._weights.check(self._core)
        self._settle()
        with self._sharded.called() if self._sharded else contextlib.nullcontext():
            returned = self.module(*args, **kwargs)
        self._passes.watch(returned)
        return returned

    def scale(self, loss):
        """The loss as `backward` takes it, for `engine.scale(loss).backward()`: multiplied by the
        loss scale of fp16, and the same where there is none."""
        scale = self._core.loss_scale
        return loss if scale == 1.0 else _Scaled.apply(loss, self._passes, scale)

    def backward(self, loss, retain_graph=False):
        """Runs the loss's backward; its gradients go to the engine as they come, and no parameter
        keeps a `grad`. Returns the loss. It is not divided by the number of micro-batches: the
        engine divides their sum."""
        self._settle()
        self._passes.drive()
        try:
            self.scale(loss).backward(retain_graph=retain_graph)
        except BaseException as error:
            if self._sharded is not None:
                self._sharded.explain(error)
            # In stage 3 a part may have been reduced before there was a gradient.
            self._passes.failed(is_reduced=self._sharded is not None)
            self._reset_calls()
            raise
        self._passes.returned()
        self._end_pass()
        return loss

    def step(self, lr_kwargs=None):
        """Ends the micro-batch and, at the window's boundary, updates the weights and advances the
        schedule of the learning rate, whose `step` is given `lr_kwargs`."""
        self._has_applied = False
        home = self._sharded or self._weights
        try:
            self._settle()
            self._prepare_step(home, lr_kwargs)
        except Exception:
            with contextlib.suppress(EngineError):  # the others do not wait for this rank
                self._core.refuse_step()
            raise
        outcome = self._core.step()
        self._passes.stepped()
        self.micro_steps += 1
        if outcome["kind"] == "accumulated":
            self._accumulated = outcome["n"]
            return
        held, self._accumulated = self._accumulated + 1, 0
        self.global_steps += 1
        self.global_samples += self._samples(held)
        if outcome["kind"] == "skipped":
            self.skipped_steps += 1
            self._norm = None
            log_dist(
                f"step {self.global_steps} is skipped: the gradient of `{outcome['parameter']}` is "
                f"not finite, rank {outcome['rank']} says; loss scale {self.loss_scale}",
                ranks=[0],
                level=logging.WARNING,
            )
            return
        self._has_applied = True
        self._norm = outcome["norm_before"]
        home.stepped()
        self.optimizer.stepped()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._print_progress()

    def _prepare_step(self, home, lr_kwargs):
        """All that a rank may refuse by itself."""
        self._passes.check()
        self._weights.check_model(self.module)
        self._weights.check(self._core)
        if not self._passes.has_ended:
            raise EngineError(
                "step() ends a micro-batch, and no backward has ended since the last step(); "
                "engine.step() and optimizer.step() are the same, and one of them is to be called"
            )
        if self.is_gradient_accumulation_boundary():
            check_metrics(self.lr_scheduler, lr_kwargs)
            home.take_over(self._core)
            self._core.set_groups(groups(self.optimizer))

    def _samples(self, held):
        """Samples of all ranks in so many micro-batches."""
        return (self.train_batch_size() or 0) * held // self.gradient_accumulation_steps()

    def zero_grad(self, set_to_none=True):
        """Between windows there are no gradients, and it does nothing. In a window it gives up
        those of the running micro-batch, and is refused once a micro-batch has ended."""
        if self._accumulated > 0:
            raise EngineError(
                f"zero_grad() would give up {self._accumulated} micro-batches of the "
                f"{self.gradient_accumulation_steps()} that a step is made of; call it after the "
                "step that updates the weights, or engine.discard_window()"
            )
        self.discard_window()

    @property
    def has_grads(self):
        """Whether the engine has gradients since the last step that updated the weights."""
        return self._accumulated > 0 or not self._passes.is_idle

    def zero_grads_of(self, params):
        """`zero_grad()` of a module that has parameters of these ids: of the whole model it is the
        engine's, of a part it is refused in a window."""
        own = [name for name, param in self.module.named_parameters() if id(param) in params]
        if not own:
            return
        if len(own) == sum(1 for _ in self.module.parameters()):
            self.zero_grad()
        elif self.has_grads:
            raise EngineError(
                f"zero_grad() of a module with `{own[0]}` would give up the gradients of a part of "
                "the model; call it after step(), or engine.discard_window() for all of them"
            )

    def discard_window(self):
        """Gives up all gradients since the last step that updated the weights, on all ranks."""
        self._core.discard_window()
        self._passes.discard()
        self._reset_calls()
        self._accumulated = 0

    @contextlib.contextmanager
    def no_sync(self):
        """Gradients add up on this rank until the first backward after it, or the step."""
        self._unsynced += 1
        self._core.set_grad_sync(False)
        try:
            yield
        finally:
            self._unsynced -= 1
            self._core.set_grad_sync(self._unsynced == 0)

    def coalesce_grad_reduction(self):
        """The gradients of several backward passes within it are reduced together. The same as
        `no_sync`: they are reduced with the first backward after it, or in the step."""
        return self.no_sync()

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Whether the next steps end the window, whatever the configuration says; None for what it
        says. A window that ends early is divided by the micro-batches that it held."""
        self._core.set_boundary(is_boundary)
        self._forced_boundary = is_boundary

    def is_gradient_accumulation_boundary(self):
        """Whether the next `step()` updates the weights."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return self._accumulated + 1 >= self.gradient_accumulation_steps()

    def was_step_applied(self):
        """Whether the last `step()` updated the weights."""
        return self._has_applied

    def get_global_grad_norm(self):
        """The norm of all gradients in the last step, before clipping; None before the first, and
        after one that was skipped since gradients were not finite."""
        return self._norm

    def get_lr(self):
        """The learning rates of the optimizer's groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr):
        """Sets the learning rate of all of the optimizer's groups."""
        for group in self.optimizer.param_groups:
            set_options(group, {"lr": lr})

    def get_mom(self):
        """The betas of the optimizer's groups, or their momentum."""
        return [
            next((group[name] for name in ("betas", "momentum") if name in group), None)
            for group in self.optimizer.param_groups
        ]

    def gradient_paths(self):
        """The dtypes of gradients at each place on their way, as lines of text; whatever is not as
        asked says why."""
        return self._core.gradient_paths

    @property
    def loss_scale(self):
        """What losses are multiplied by in this window."""
        return self._core.loss_scale

    @property
    def device(self):
        """Where the model is."""
        return self._back_end.device

    @property
    def global_rank(self):
        """This process's rank."""
        return self._place.rank

    @property
    def local_rank(self):
        """This process's rank on its machine."""
        return self._place.local_rank

    @property
    def world_size(self):
        """Ranks in the world."""
        return self._place.size

    def state_dict(self, *args, **kwargs):
        """The model's own, which is whole on every rank; in stage 3 a collective call."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        """Writes the model's weights; master weights follow in the next step."""
        return self.module.load_state_dict(*args, **kwargs)

    def destroy(self):
        """Lets go of the model, which keeps its weights and trains as any other from then on, and
        leaves the world; a collective call."""
        self._weights.release(self._core)
        for hook in self._hooks:
            hook.remove()
        registry.remove(self._weights.params)
        if self._sharded is not None:
            self._sharded.dissolve()
            self._sharded = None
        unwatch(self)
        self.optimizer.release()
        self._core = _Destroyed()

    def _take_model(self, found, held):
        """From here on the weights are the engine's; `held` are the buffers."""
        if self.config.stage == 3:
            self._sharded = Sharded(self._core, self._weights, self._prefetch())
        else:
            self._weights.alias(self._core)
        self._take_pieces()
        if self._sharded is not None:
            self._sharded.watch(found, self.module)
        if self._place.size > 1:
            buffers.broadcast(self._core, self._back_end, held)
        registry.add(self, self._weights.params)
        for index, param in self._weights.trained():
            take = _taker(weakref.ref(self), index)
            self._hooks.append(param.register_post_accumulate_grad_hook(take))

    def _give_model_back(self, error):
        """Leaves a whole model to a caller whose `initialize` has failed."""
        try:
            self.destroy()
        except Exception as other:
            error.add_note(f"the model's weights remain sharded: {other}")

    def _take(self, index, param):
        grad, param.grad = param.grad, None
        if grad is None:
            return  # a Function may say so
        self._passes.arrive(index, self._core, self._end_pass)
        name = self._weights.names[index][0]
        grad = local_grad(param, grad, name)
        if grad.is_sparse:
            raise EngineError(
                f"the gradient of `{name}` is sparse; build the embedding with sparse=False"
            )
        self._core.grad_ready(index, self._back_end.give(grad), self._passes.scale)
        if self._sharded is not None:
            self._sharded.arrived(index)

    def _settle(self):
        if self._passes.settle():
            self._reset_calls()

    def _end_pass(self):
        self._passes.ended()
        self._core.backward_end()
        if self._sharded is not None:
            self._sharded.pass_ended()

    def _reset_calls(self):
        """No backward is under way."""
        if self._sharded is not None:
            self._sharded.reset()

    def _prefetch(self):
        """How many elements are gathered ahead, and how many may be whole for that: as rank 0 says,
        for all ranks start the same gathers."""
        told = self.config.prefetch if self._core.overlaps and guard.CAN_FORBID else (0, 0)
        told = torch.tensor(told, dtype=torch.int64)
        if self._place.size > 1:
            self._back_end.broadcast(self._core, [told], 0)
        return told.tolist()

    def _take_pieces(self):
        """Parameters that were made inside of `zero.Init` get their values, one by one."""
        for index, param in enumerate(self._weights.params):
            if pieces.find(param) is None:
                continue
            with pieces.taken(param) as values:
                if self._weights.groups[index] is not None:
                    self._core.set_full_param(index, self._back_end.give(values))
                elif self._sharded is None:
                    param.data.copy_(values)
                else:
                    self._sharded.bucket_of(param).write(param, values)

    def _print_progress(self):
        every = self.config.steps_per_print
        if every and self.global_rank == 0 and self.global_steps % every == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
                f"norm={self._norm:.4g}",
                flush=True,
            )


def _taker(engine, index):
    """A parameter's hook. A model does not keep its engine."""

    def take(param):
        alive = engine()
        if alive is not None:
            alive._take(index, param)

    return take
