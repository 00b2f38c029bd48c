"""Engines behind one interface: `micro_batch(batch, last)` returns the loss, `step()` updates.

Every one trains with AdamW and f32 master weights, on one thread a rank. What is measured starts
from the same weights and the same batches.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

LEARNING_RATE = 1e-4
# Elements of a hand-made all-reduce.
CHUNK = 16 << 20


def make(name, model, setting):
    """The engine of a name, such as `ddp` or `oxizero 2`."""
    family, *words = name.split()
    return KINDS[family](*words, model=model, setting=setting)


def load(name):
    """Imports what the engine of a name needs; ImportError where it is not installed."""
    family = name.split()[0]
    if family not in KINDS:
        raise ImportError(f"{family} is not one of {', '.join(KINDS)}")
    if family == "oxizero":
        import oxizero  # noqa: F401
    elif family == "deepspeed":
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_LOG_LEVEL": "error"}
        # Its operators are built by ninja, which lies beside the interpreter.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        import deepspeed  # noqa: F401
    elif family == "fsdp2":
        import torch.distributed.fsdp  # noqa: F401


def config(stage, setting):
    """DeepSpeed's configuration, the same for DeepSpeed and for oxizero."""
    told = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setting["accumulation"],
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
        "steps_per_print": 1 << 30,
    }
    if setting["dtype"] == "bf16":
        told["bf16"] = {"enabled": True}
        told["data_types"] = {"grad_accum_dtype": "fp32"}
    if setting["wire"] is not None:
        told["communication_data_type"] = setting["wire"]
    return told


def adamw(params):
    return torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


class Compute:
    """Forward and backward alone: no rank waits, no gradient is kept, no weight changes."""

    def __init__(self, model, setting):
        self.model = model.to(dtype(setting))
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(_drop)

    def micro_batch(self, batch, last):
        loss = self.model(batch)
        loss.backward()
        return loss

    def step(self):
        pass


def _drop(param):
    param.grad = None


class Masters:
    """f32 master weights beside a model of another dtype; for an f32 model they are its own."""

    def __init__(self, model, setting):
        masters = [param.detach().float() for param in model.parameters()]
        model.to(dtype(setting))
        self.params = list(model.parameters())
        self.own = self.params[0].dtype == torch.float32
        self.masters = self.params if self.own else masters
        self.optimizer = adamw(self.masters)

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        if not self.own:
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)


class Accumulated:
    """Gradients add up in f32 by hand, and all-reduce in f32 at the boundary."""

    def __init__(self, model, setting):
        self.model, self.accumulation = model, setting["accumulation"]
        self.masters = Masters(model, setting)
        self.sums = torch.zeros(sum(param.numel() for param in model.parameters()))
        start = 0
        for param, master in zip(self.masters.params, self.masters.masters, strict=True):
            end = start + param.numel()
            total = self.sums[start:end].view_as(param)
            start = end
            if self.masters.own:
                param.grad = total
                continue
            master.grad = total
            param.register_post_accumulate_grad_hook(_adds_to(total))
        if setting["ranks"] > 1:
            _init_distributed()

    def micro_batch(self, batch, last):
        loss = self.model(batch)
        (loss / self.accumulation).backward()
        return loss

    def step(self):
        if dist.is_initialized():
            for chunk in self.sums.split(CHUNK):
                dist.all_reduce(chunk)
            self.sums /= dist.get_world_size()
        self.masters.step()
        self.sums.zero_()


def _adds_to(total):
    def add(param):
        total.add_(param.grad)
        param.grad = None

    return add


class Ddp:
    """torch's DistributedDataParallel: gradients add up and travel in the model's dtype."""

    def __init__(self, model, setting):
        _init_distributed()
        self.masters = Masters(model, setting)
        self.accumulation = setting["accumulation"]
        wrap = torch.nn.parallel.DistributedDataParallel
        self.model = wrap(model, gradient_as_bucket_view=True)

    def micro_batch(self, batch, last):
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = self.model(batch)
            (loss / self.accumulation).backward()
        return loss

    def step(self):
        masters = self.masters
        if not masters.own:
            for param, master in zip(masters.params, masters.masters, strict=True):
                master.grad = param.grad.float()
        masters.step()
        if not masters.own:
            for master in masters.masters:
                master.grad = None
        # Views of the buckets, which stay.
        self.model.zero_grad(set_to_none=False)


class Fsdp2:
    """torch's fully_shard, a unit a layer; gradients travel and add up in f32."""

    def __init__(self, model, setting):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        _init_distributed()
        mesh = init_device_mesh("cpu", (setting["ranks"],))
        policy = MixedPrecisionPolicy(param_dtype=dtype(setting), reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.accumulation = setting["accumulation"]
        self.optimizer = adamw(self.model.parameters())

    def micro_batch(self, batch, last):
        loss = self.model(batch)
        (loss / self.accumulation).backward()
        return loss

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed:
    """DeepSpeed in a ZeRO stage."""

    def __init__(self, stage, model, setting):
        import deepspeed

        deepspeed.init_distributed("gloo")
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=config(int(stage), setting),
        )

    def micro_batch(self, batch, last):
        loss = self.engine(batch)
        self.engine.backward(loss)
        if not last:
            self.engine.step()
        return loss

    def step(self):
        self.engine.step()


class Oxizero(DeepSpeed):
    """oxizero in a ZeRO stage, by a back end."""

    def __init__(self, stage, back_end="native", *, model, setting):
        import oxizero

        told = config(int(stage), setting)
        if back_end != "native":
            _init_distributed()
            told["oxizero"] = {"backend": back_end}
        self.engine, *_ = oxizero.initialize(model=model, config=told)

    def plan(self):
        """The most bytes that the engine counts, which its tests hold to the plan."""
        return self.engine._core.peak_memory


KINDS = {
    "compute": Compute,
    "single": Accumulated,
    "ddp": Ddp,
    "ddp-f32": Accumulated,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
    "oxizero": Oxizero,
}


def dtype(setting):
    return {"bf16": torch.bfloat16, "f32": torch.float32}[setting["dtype"]]


def _init_distributed():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
