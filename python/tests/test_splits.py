"""Parameters in parts, experts and DTensors, against one process that holds everything."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import oxizero
from oxizero import utils

WIDTH, STEPS, CLIP = 4, 5, 0.5


class Mlp(torch.nn.Module):
    """Whole, or in parts over the ranks of `group`."""

    def __init__(self, parts=1, part=0, group=None):
        super().__init__()
        self.group = group
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape, dim=None):
            whole = torch.randn(shape, generator=generator)
            held = whole if dim is None else whole.chunk(parts, dim)[part]
            return torch.nn.Parameter(held.clone())

        self.scale = drawn(WIDTH)
        self.up = drawn(8, WIDTH, dim=0)
        self.bias = drawn(8, dim=0)
        self.down = drawn(WIDTH, 8, dim=1)
        self.shift = drawn(WIDTH)
        self.register_buffer("part", torch.tensor([1.0 + part]))

    def forward(self, x):
        x = _Both.apply(x * self.scale, self.group)
        inner = functional.linear(x, self.up, self.bias).tanh()
        return (_Sum.apply(inner @ self.down.t(), self.group) + self.shift).square().mean()


class _Both(torch.autograd.Function):
    """What all ranks of a group read: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _summed(x, group):
    x = x.contiguous().clone()
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def batch(step, data_rank):
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randn(3, WIDTH, generator=generator)


def plain(model, data_ranks, forward=lambda model, step, rank: model(batch(step, rank))):
    """By step the whole gradients and their norm; and the weights in the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    told = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(data_ranks):
            (forward(model, step, rank) / data_ranks).backward()
        grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        told.append((grads, norm.item()))
        optimizer.step()
    return told, {name: param.detach() for name, param in model.named_parameters()}


def start(model, stage, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": CLIP}
    return oxizero.initialize(model=model, optimizer=optimizer, config=config, **options)[0]


close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)


def train_and_compare(engine, expected, own, inputs):
    """Five steps; `own` cuts what this rank holds out of a whole tensor."""
    told, weights = expected
    for step, (grads, norm) in enumerate(told):
        engine.backward(engine(*inputs(step)))
        whole = utils.safe_get_full_model_grads(engine, scope="global")
        held = utils.safe_get_full_model_grads(engine)
        assert whole.keys() == held.keys() == grads.keys()
        for name, grad in grads.items():
            close(whole[name], grad)
            assert held[name].equal(own(name, whole[name]))
        for name, param in engine.module.named_parameters():
            assert utils.safe_get_full_grad(param).equal(held[name])
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    for name, param in engine.module.named_parameters():
        close(utils.safe_get_full_fp32_param(param), own(name, weights[name]))
        held = param.to_local() if isinstance(param, DTensor) else param
        close(held.detach(), own(name, weights[name]))


DIMS = {"up": 0, "bias": 0, "down": 1}


def tensor_parallel(rank, stage, by, expected):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place, part = divmod(rank, 2)
    model = Mlp(2, part, mesh.get_group("tensor"))
    if place:
        for param in model.parameters():
            param.data.fill_(float("nan"))  # rank 0's and rank 1's are taken
    groups = {"ranks": [2 * place, 2 * place + 1], "name": "tensor",
              "group": mesh.get_group("tensor")}
    for name, dim in DIMS.items():
        oxizero.mark_split(getattr(model, name), dim - 2 if name == "down" else dim, groups[by])
    engine = start(model, stage, mesh_param=mesh if by == "name" else None)
    assert model.part.item() == 1.0 + part, "a buffer is that of a rank with the same part"

    def own(name, whole):
        return whole.chunk(2, DIMS[name])[part] if name in DIMS else whole

    train_and_compare(engine, expected, own, lambda step: (batch(step, place),))


@pytest.mark.parametrize("stage,by", [(0, "ranks"), (1, "name"), (2, "ranks"), (2, "group")])
def test_split_parameters_train_as_one_process_does(ranks, stage, by):
    ranks(4, tensor_parallel, stage, by, plain(Mlp(), 2))


class Experts(torch.nn.Module):
    """The first half of the rows goes to the first expert, the other to the second. Whole, or with
    one of the experts, the rows being exchanged."""

    def __init__(self, expert=None, group=None):
        super().__init__()
        self.group = group
        torch.manual_seed(3)
        self.first = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        experts = torch.randn(2, WIDTH, WIDTH)
        self.expert = torch.nn.Parameter(experts if expert is None else experts[expert].clone())

    def forward(self, x):
        rows = (x @ self.first).unflatten(0, (2, -1))
        if self.group is None:
            rows = torch.bmm(rows, self.expert)
        else:
            rows = _Exchange.apply(_Exchange.apply(rows, self.group) @ self.expert, self.group)
        return rows.square().mean()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        received = torch.empty_like(rows.contiguous())
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.forward(ctx, grad, ctx.group), None


def rows(step, rank):
    return torch.cat([batch(step, rank), batch(step + 50, rank)])


def experts(rank, stage, by, expected):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    group = mesh.get_group("expert")
    model = Experts(rank % 2, group)
    if by == "deepspeed":
        model.expert.allreduce, model.expert.group_name = False, "ep_size_2"
    else:
        oxizero.mark_expert(model.expert, group)
    engine = start(model, stage)

    def own(name, whole):
        return whole[rank % 2] if name == "expert" else whole

    train_and_compare(engine, expected, own, lambda step: (rows(step, rank),))


@pytest.mark.parametrize("stage,by", [(0, "mark"), (1, "deepspeed"), (2, "mark")])
def test_experts_get_the_gradients_of_all_their_tokens(ranks, stage, by):
    expected = plain(Experts(), 4, lambda model, step, rank: model(rows(step, rank)))
    ranks(4, experts, stage, by, expected)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 8)
        self.down = torch.nn.Linear(8, WIDTH)
        self.shift = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        x = self.down(self.up(self.norm(x)).tanh())
        return (x + self.shift).square().mean()


PLACES = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def dtensors(rank, size, stage, expected):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model, tensor = Block(), mesh["tensor"]
    plan = {"norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(
        input_layouts=Shard(0)), "down": RowwiseParallel()}
    parallelize_module(model, tensor, plan)
    assert model.norm.weight.placements == (Replicate(),)
    engine = start(model, stage)
    before = model.up.weight.to_local().data_ptr()
    place, part = divmod(rank, 2)

    def own(name, whole):
        return whole.chunk(2, PLACES[name])[part] if name in PLACES else whole

    # Sequence parallelism takes a rank's rows, of the batch that is that of both.
    def rows_of(step):
        return batch4(step, place).chunk(2)[part]

    train_and_compare(engine, expected, own, lambda step: (rows_of(step),))
    assert model.up.weight.to_local().data_ptr() == before, "no copy of the weights"
    with torch.no_grad():
        model.up.weight.mul_(2.0)
    engine.backward(engine(rows_of(9)) * 0.0)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    engine.step()
    close(utils.safe_get_full_fp32_param(model.up.weight), 2 * own("up.weight",
          expected[1]["up.weight"]))


def batch4(step, data_rank):
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randn(4, WIDTH, generator=generator)


@pytest.mark.parametrize("size,stage", [(2, 1), (4, 0), (4, 2)])
def test_dtensors_are_understood(ranks, size, stage):
    expected = plain(Block(), size // 2, lambda model, step, rank: model(batch4(step, rank)))
    ranks(size, dtensors, size, stage, expected)


def written_in_parts(rank, stage):
    """Rank 2 has the say: of parts, with those of rank 3; of a whole one, alone."""
    model = Two()
    part = rank % 2
    oxizero.mark_split(model.a, 0, [0, 1] if rank < 2 else [2, 3])
    engine = start(model, stage)
    for _ in range(2):
        with oxizero.zero.GatheredParameters(model.parameters(), modifier_rank=2), torch.no_grad():
            for param in model.parameters():
                param.fill_(10.0 + rank)
    assert utils.safe_get_full_fp32_param(model.a).eq(12.0 + part).all()
    with oxizero.zero.GatheredParameters(model.parameters()):
        return model.a.unique().tolist(), model.b.unique().tolist()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_modifier_of_parts_is_a_global_rank(ranks, stage):
    told = ranks(4, written_in_parts, stage)
    assert [a for a, _ in told] == [[12.0], [13.0], [12.0], [13.0]]
    # What both ranks of a pair hold alike has as many groups as ranks that hold it: one.
    assert [b for _, b in told] == [[12.0]] * 4


def written_by_one_expert(rank, stage):
    model = Two()
    oxizero.mark_expert(model.a, [0, 1])
    engine = start(model, stage)
    with oxizero.zero.GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
        for param in model.parameters():
            param.fill_(10.0 + rank)
    with oxizero.zero.GatheredParameters(model.parameters()):
        told = model.a.unique().tolist(), model.b.unique().tolist()
    engine.destroy()
    return told


@pytest.mark.parametrize("stage", [1, 3])
def test_beside_experts_what_all_ranks_hold_is_written_by_one(ranks, stage):
    told = ranks(2, written_by_one_expert, stage)
    assert told == [([10.0], [11.0]), ([11.0], [11.0])]


def test_a_modifier_that_is_no_rank_is_refused():
    with pytest.raises(oxizero.ConfigError, match="modifier_rank=1. names none of the 1 ranks"):
        oxizero.zero.GatheredParameters([], modifier_rank=1)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(2, 3))
        self.b = torch.nn.Parameter(torch.zeros(2, 3))


class Mpu:
    """What Megatron tells, with lists of ranks for process groups."""

    def __init__(self, tensor=None, data=None, pipe=1):
        self.get_tensor_model_parallel_group = lambda: tensor
        self.get_data_parallel_group = lambda: data
        self.get_pipe_parallel_world_size = lambda: pipe


def refusals(rank):
    def refused(match, model, **options):
        with pytest.raises(oxizero.ConfigError, match=match):
            start(model, 1, **options)

    def marked(*marks):
        model = Two()
        for name, call, *args in marks:
            call(getattr(model, name), *args)
        return model

    split, expert = oxizero.mark_split, oxizero.mark_expert
    for group, why in [
        ([0, 1, 3], "equal distance"), ([0, 1, 2], "tile the 4"), ([0, 5], "no rank 5"),
        ([1, 2], "rank 0"), ([], "rank 0"), ("tp", "no dimension of mesh_param"),
        (7, "neither a process group"), ([-1, 0], "negative rank"), ([1], "rank 0"),
    ]:
        refused(f"`a`.*{why}", marked(("a", split, 0, group)))
    refused("split of `a`.*expert of `b`.*different", marked(
        ("a", split, 0, [0, 1]), ("b", expert, [0, 1])))
    refused("split of `a`.*expert of `b`.*overlap", marked(
        ("a", split, 0, [0, 1]), ("b", expert, [0, 1, 2, 3])))
    with pytest.raises(oxizero.ConfigError, match="axis = 2"):
        split(Two().a, 2, [0, 1])
    model = Two()
    model.a.allreduce, model.a.group_name = False, "mine"
    refused("`a`.allreduce is False, and its group_name = 'mine'", model)
    model = Two()
    model.a.model_parallel = True
    refused("`a`.model_parallel does not say", model)
    model = Two()
    model.a.tensor_model_parallel, model.a.partition_dim = True, 0
    refused("`a`.tensor_model_parallel is set, and initialize.. was given no mpu", model)
    refused("get_data_parallel_group.. has the ranks .0, 1", Two(), mpu=Mpu([0, 1], [0, 1]))
    refused("get_pipe_parallel_world_size.. = 2", Two(), mpu=Mpu(pipe=2))
    refused("mesh_param = .2, 2. is refused", Two(), mesh_param=(2, 2))


def test_what_is_no_mesh_is_refused_by_name(monkeypatch):
    for name, value in [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")]:
        monkeypatch.setenv(name, value)
    refusals(0)


def shared_batches(rank):
    model = Two()
    place, part = divmod(rank, 2)
    model.a.tensor_model_parallel, model.a.partition_dim = True, 1
    data = torch.arange(8.0).unsqueeze(1)
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    mpu = Mpu([2 * place, 2 * place + 1], [part, 2 + part])
    engine, _, loader, _ = oxizero.initialize(
        model=model, config=config, training_data=data, mpu=mpu
    )
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (1, 4)
    rows = torch.cat(list(loader))
    engine.backward((model.a * (1.0 + part) + model.b).sum() * rows.sum())
    grads = utils.safe_get_full_model_grads(model, scope="global")
    assert grads["a"].tolist() == [[14.0] * 3 + [28.0] * 3] * 2
    assert grads["b"].tolist() == [[14.0] * 3] * 2
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx((12 * 14.0**2 + 6 * 28.0**2) ** 0.5)
    return rows.flatten().tolist()


def test_ranks_of_a_split_work_on_the_same_batches(ranks):
    told = ranks(4, shared_batches)
    assert told[0] == told[1] and told[2] == told[3]
    assert sorted(told[0] + told[2]) == list(range(8))


def other_batches(rank):
    model = Two()
    oxizero.mark_split(model.a, 0, [0, 1])
    engine = start(model, 2)
    for _ in range(1 + rank):
        engine.backward((model.a + model.b).sum())
    with pytest.raises(oxizero.EngineError, match="to work on the same micro-batches"):
        utils.safe_get_full_model_grads(model)


def test_ranks_that_do_not_are_told(ranks):
    ranks(2, other_batches)


def fully_sharded(rank):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = fully_shard(Block())
    with pytest.raises(oxizero.ConfigError, match="a model in FSDPModule is refused"):
        start(model, 1)
    uneven = Block()
    plan = {"up": ColwiseParallel()}
    uneven.up = torch.nn.Linear(WIDTH, 7)
    parallelize_module(uneven, init_device_mesh("cpu", (2,)), plan)
    with pytest.raises(oxizero.ConfigError, match="dimension 0 of `up.weight`, of 7"):
        start(uneven, 1)


def test_dtensors_that_are_not_in_equal_parts_are_refused(ranks):
    ranks(2, fully_sharded)


def transposed(rank):
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)]))
    with pytest.raises(oxizero.ConfigError, match="dimension 0 of `a`.*row-major"):
        start(model, 1)


def test_a_dtensor_whose_parts_lie_in_another_order_is_refused(ranks):
    ranks(4, transposed)
