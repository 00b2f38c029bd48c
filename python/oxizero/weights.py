"""A model's parameters in the engine's memory."""

import torch

from oxizero import pieces
from oxizero._oxizero import ConfigError, EngineError
from oxizero.splits import is_dtensor, local

_TRAINED = (torch.float32, torch.bfloat16, torch.float16)


def replaced(name):
    """The error of a parameter that somebody has given other memory."""
    return EngineError(
        f"parameter `{name}` has other memory than initialize() gave it, by `param.data = ...` or "
        "the like; convert the model before initialize(), and write weights in place"
    )


class Weights:
    """The parameters that the engine holds, and how their tensors lie in its memory."""

    def __init__(self, module, optimizer, model_dtype):
        names = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), (param, []))[1].append(name)
        group_of = {
            id(param): index
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        unknown = group_of.keys() - names.keys()
        if unknown:
            raise ConfigError(
                f"the optimizer has {len(unknown)} parameters that are not the model's"
            )
        _check_memory(module)
        self.params, self.names, self.groups, self.dtypes = [], [], [], []
        self.frozen = []
        self.others = []
        for param, own in names.values():
            if param.grad is not None:
                raise ConfigError(
                    f"parameter `{own[0]}` has a gradient from before initialize(), which would "
                    "be added to the first one; call model.zero_grad()"
                )
            group = group_of.get(id(param)) if param.requires_grad else None
            if group is None and param.dtype not in _TRAINED:
                self.others.append((own[0], param))
                continue
            casts = model_dtype is not None and param.dtype == torch.float32
            if casts and is_dtensor(param):
                raise ConfigError(
                    f"parameter `{own[0]}` is a DTensor of float32, which cannot be made "
                    f"{model_dtype} any more; convert the model before it is parallelized"
                )
            self.params.append(param)
            self.names.append(own)
            self.groups.append(group)
            self.frozen.append(not param.requires_grad)
            self.dtypes.append(getattr(torch, model_dtype) if casts else param.dtype)
        self._known = {id(param) for param, _ in names.values()}
        self._group_of = dict(zip(map(id, self.params), self.groups, strict=True))
        self._versions = []
        self._addresses = []

    def described(self, unit_of, back_end):
        """The parameters as the engine takes them, with the number of the unit that each is
        gathered with, by its id. Master weights start from the weights as they are, before any
        cast."""
        return [
            {
                "names": names,
                "shape": tuple(local(param).shape),
                "dtype": str(dtype).removeprefix("torch."),
                "group": group,
                "unit": unit_of.get(id(param), 0),
                "initial": None if pieces.find(param) else back_end.give(local(param)),
            }
            for param, names, group, dtype in zip(
                self.params, self.names, self.groups, self.dtypes, strict=True
            )
        ]

    def alias(self, core):
        """Lets every parameter lie in the engine's memory."""
        for index, param in enumerate(self.params):
            local(param).data = core.back_end.take(core.weights(index))
        self._addresses = [local(param).data_ptr() for param in self.params]
        self._note()

    def trained(self):
        """Index and parameter of those that have gradients."""
        pairs = enumerate(zip(self.params, self.groups, strict=True))
        return [(index, param) for index, (param, group) in pairs if group is not None]

    def check_model(self, module):
        """Refuses parameters that are not those of `initialize`, and one that was frozen and is no
        longer."""
        for name, param in module.named_parameters():
            if id(param) not in self._known:
                raise EngineError(
                    f"parameter `{name}` is new, or another tensor than in initialize(), and the "
                    "engine does not train it; change the model before initialize(), and write "
                    "weights in place"
                )
            if param.grad is not None and self._group_of.get(id(param)) is not None:
                raise EngineError(
                    f"parameter `{name}` has a `grad`, which somebody set: the engine has the "
                    "gradients; write them with oxizero.utils.safe_set_full_grad, and set `grad` "
                    "to None"
                )
        for frozen, param, names in zip(self.frozen, self.params, self.names, strict=True):
            if frozen and param.requires_grad:
                raise EngineError(
                    f"parameter `{names[0]}` was frozen in initialize(), so that no optimizer "
                    "states are kept for it; set requires_grad before"
                )

    def check(self, core):
        """Refuses writes to weights of which the machine's ranks have one copy."""
        if not core.shares_weights:
            return
        for index, param in enumerate(self.params):
            if local(param)._version != self._versions[index]:
                raise EngineError(
                    f"parameter `{self.names[index][0]}` was written, and all ranks of the machine "
                    "have one copy of it, which each of them would write: write it in "
                    "oxizero.zero.GatheredParameters(params, modifier_rank=0), or set "
                    "`oxizero.share_weights` to false"
                )

    def take_over_shared(self, core, index, is_writer):
        """One rank wrote a parameter of which the machine's ranks have one copy, while all were in
        `GatheredParameters`."""
        held = local(self.params[index])
        if held._version != self._versions[index] and not is_writer:
            raise EngineError(
                f"parameter `{self.names[index][0]}` was written by a rank that is not the "
                "modifier_rank of GatheredParameters, and all have one copy of it"
            )
        core.take_over_weights(index)
        torch.autograd.graph.increment_version(held)
        self._versions[index] = held._version

    def release(self, core):
        """Leaves the model memory of its own."""
        if core.shares_weights:
            for param in self.params:
                local(param).data = local(param).data.clone()

    def take_over(self, core):
        """Weights that were written since the last step are the master weights from now on."""
        for index, param in enumerate(self.params):
            held = local(param)
            if held.data_ptr() != self._addresses[index]:
                raise replaced(self.names[index][0])
            if held._version != self._versions[index]:
                core.take_over_weights(index)
                self._versions[index] = held._version

    def wrote(self, index):
        """The engine wrote a parameter's weights: graphs that still need the old ones are to
        notice."""
        held = local(self.params[index])
        is_known = bool(self._versions) and held._version == self._versions[index]
        torch.autograd.graph.increment_version(held)
        if is_known:
            self._versions[index] = held._version

    def loaded(self, is_aliased):
        """The engine wrote all weights: graphs that still need the old ones are to notice."""
        for param in self.params:
            torch.autograd.graph.increment_version(local(param))
        if is_aliased:
            self._note()

    def stepped(self):
        """The engine wrote the weights: graphs that still need the old ones are to notice."""
        for _, param in self.trained():
            torch.autograd.graph.increment_version(local(param))
        self._note()

    def _note(self):
        self._versions = [local(param)._version for param in self.params]


def _check_memory(module):
    """Refuses a parameter that shares elements with another, or with a buffer: the engine would
    give it memory of its own."""
    spans = {}
    params = [(f"parameter `{name}`", param) for name, param in module.named_parameters()]
    buffers = [(f"buffer `{name}`", buffer) for name, buffer in module.named_buffers()]
    for rank, (name, tensor) in enumerate(params + buffers):
        tensor = local(tensor)
        if tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        start = tensor.storage_offset() * tensor.element_size()
        end = start + (reach + 1) * tensor.element_size()
        spans.setdefault(tensor.untyped_storage()._cdata, []).append(
            (start, end, name, rank < len(params))
        )
    for held in spans.values():
        held.sort()
        # Of all tensors so far, and of the parameters among them, the one that ends last.
        last, last_param = (0, ""), (0, "")
        for start, end, name, is_param in held:
            reaching, first = last if is_param else last_param
            if start < reaching:
                raise ConfigError(
                    f"{first} and {name} share memory, and the engine would separate them; "
                    "assign one Parameter to both names, or clone one of them"
                )
            last = max(last, (end, name))
            if is_param:
                last_param = max(last_param, (end, name))
