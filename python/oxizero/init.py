"""`zero.Init`: models whose parameters are sharded while they are built."""

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from oxizero import configuration, pieces, world
from oxizero._oxizero import ConfigError

# What is asked of a parameter without reading its elements.
_OF_NO_ELEMENT = ("__get__", "__set__", "dim", "size", "numel", "nelement", "ndimension", "stride",
                  "element_size", "is_floating_point", "is_complex", "requires_grad_", "detach",
                  "untyped_storage", "register_hook", "__hash__", "__len__", "is_contiguous")

# Attributes that are views, which torch makes only of memory that is there.
_VIEWS = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))

# What depends on how many ranks have batches of their own, which the model will say.
_OF_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# The outermost Init that is entered; those inside of it do nothing of their own.
_active = None


class Init:
    """Inside of it every module that is built has its parameters sharded as soon as its `__init__`
    ends, so that no rank holds more than one module whole; `initialize` takes such a model in any
    stage. Rank 0's values count. All ranks build the same, together.

    What still reads or writes such a parameter inside of it, as a model that initializes the
    weights of the modules it is made of, is given it whole for the length of the operation.
    `module` is sharded at once. Half-precision parameters are made of floating-point ones if
    `dtype` or the configuration's bf16 or fp16 says so.

    Parameters stay on the device that they are made on, such as that of `with torch.device(...)`
    around the model's constructor.
    """

    def __init__(self, module=None, data_parallel_group=None, mem_efficient_linear=True,
                 remote_device=None, pin_memory=False, config_dict_or_path=None, config=None,
                 enabled=True, dtype=None, mpu=None, **others):
        refused = {"data_parallel_group": data_parallel_group, "mpu": mpu} | others
        refused |= {"remote_device": None if remote_device in ("cpu", "none") else remote_device}
        refused |= {"pin_memory": pin_memory or None}
        for name, value in refused.items():
            if value is not None and value is not False:
                raise ConfigError(
                    f"zero.Init({name}={value!r}) is refused: parameters are sharded over all "
                    "ranks, on the device that they are made on; leave it out"
                )
        self._enabled = enabled
        configured = _read(config_dict_or_path or config)
        self._dtype = dtype or _dtype(configured)
        self._back_end = configured and configured.backend
        self._mode = self._watch = None
        self._wrapped = []
        # Modules whose __init__ runs; of one object, those of its classes nest.
        self._building = []
        if module is not None and enabled:
            for inner in module.modules():
                self._shard(inner.parameters(recurse=False))

    def __enter__(self):
        global _active
        if self._enabled and _active is None:
            _active = self
            torch.nn.Module.__init_subclass__ = classmethod(lambda kind, **_: self._wrap(kind))
            for kind in set(_classes(torch.nn.Module)):
                self._wrap(kind)
            self._watch = register_module_parameter_registration_hook(self._registered)
            self._mode = _Whole()
            self._mode.__enter__()
        return self

    def __exit__(self, *error):
        global _active
        if _active is not self:
            return
        _active = None
        self._mode.__exit__(*error)
        self._watch.remove()
        del torch.nn.Module.__init_subclass__
        for kind, original in self._wrapped:
            kind.__init__ = original
        self._wrapped, self._building = [], []

    def _wrap(self, kind):
        original = kind.__dict__.get("__init__")
        if original is None:
            return

        def build(module, *args, **kwargs):
            is_outermost = not any(module is other for other in self._building)
            self._building.append(module)
            try:
                with pieces.replaceable(_parametrized(module, *args, **kwargs)):
                    original(module, *args, **kwargs)
            finally:
                self._building.pop()
            if is_outermost:
                self._shard(module.parameters(recurse=False))

        build.__wrapped__ = original
        build.__name__, build.__doc__ = "__init__", original.__doc__
        kind.__init__ = build
        self._wrapped.append((kind, original))

    def _registered(self, module, name, param):
        """What a module is given after its `__init__` is sharded at once, and before it what is
        made of the memory of another parameter, which goes with that one, as the old one does in
        `layer.weight = Parameter(layer.weight.data)`."""
        is_built = not any(module is other for other in self._building)
        if is_built or pieces.of(param) is not None:
            self._shard([param])

    def _shard(self, params):
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for param in params:
                if self._dtype and param.is_floating_point() and pieces.find(param) is None:
                    param.data = param.data.to(self._dtype)
                pieces.shard(param, self._back_end)


class _Whole(TorchFunctionMode):
    """Operations on parameters in pieces find them whole; what they write is rank 0's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        used = {}
        if getattr(func, "__name__", "") not in _OF_NO_ELEMENT or func in _VIEWS:
            given = [*args, *kwargs.values()]
            given += [item for value in given if isinstance(value, (list, tuple)) for item in value]
            for tensor in given:
                piece = pieces.of(tensor) if isinstance(tensor, torch.Tensor) else None
                if piece is not None:
                    used[piece] = tensor
        if not used:
            return func(*args, **kwargs)
        versions = [tensor._version for tensor in used.values()]
        for piece in used:
            piece.hold()
        try:
            result = func(*args, **kwargs)
            for (piece, tensor), version in zip(used.items(), versions, strict=True):
                if tensor._version != version:
                    piece.share(0)
            return result
        finally:
            for piece in used:
                piece.let_go()


def _parametrized(module, _=None, original=None, *others, **named):
    """The tensor of which a module makes the parameters that a parametrization has, if it does.
    Those that give it other memory do it with `Tensor.set_`, which no mode sees."""
    return original if isinstance(module, ParametrizationList) else None


def _classes(kind):
    yield kind
    for child in type.__subclasses__(kind):
        yield from _classes(child)


def _read(config):
    """A configuration, if there is one; it is checked as `initialize` does."""
    if config is None:
        return None
    fields = configuration.fields(config).items()
    config = {name: value for name, value in fields if name not in _OF_BATCHES}
    return configuration.read(config, world.place().size)


def _dtype(config):
    """What a configuration makes the weights."""
    return getattr(torch, config.model_dtype) if config and config.model_dtype else None
