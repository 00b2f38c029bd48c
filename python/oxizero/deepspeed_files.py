"""The files of a DeepSpeed ZeRO checkpoint: what is in them, by parameter.

They are pickles. Only tensors, plain values and the four things of DeepSpeed's own named here are
read of them; whatever else a file names is refused before it is called.
"""

import re
from pathlib import Path

import torch

from oxizero._oxizero import EngineError

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_OF_STAGE3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_OF_ALL = "mp_rank_00_model_states.pt"

# Keys of the model's file that are DeepSpeed's; the others are the caller's `client_state`.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
    "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_dimensions",
}


class Fields:
    """An object of a class of DeepSpeed's, without the class: its fields."""


class _Stage(int):
    """`ZeroStageEnum`."""

    disabled, optimizer_states, gradients, weights = range(4)


def _member(kind, name):
    """`getattr`, of a stage alone."""
    if kind is not _Stage or name not in vars(_Stage):
        raise EngineError(f"a file asks for `{name}` of {kind!r}, which none of DeepSpeed's does")
    return vars(_Stage)[name]


def _stands_for(module, name, thing):
    thing.__module__, thing.__qualname__, thing.__name__ = module, name, name
    return thing


def _kind(module, name):
    return _stands_for(module, name, type(name, (Fields,), {}))


_KNOWN = [
    _stands_for("builtins", "getattr", _member),
    _stands_for("deepspeed.runtime.zero.config", "ZeroStageEnum", _Stage),
    _kind("deepspeed.utils.tensor_fragment", "fragment_address"),
    _kind("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    _kind("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
]


class Files:
    """A checkpoint of one folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        names = sorted(path.name for path in self.folder.glob("*.pt"))
        _refuse_others(self.folder, names)
        optims = {int(found[1]): name for name in names if (found := _OPTIM.fullmatch(name))}
        models = {int(found[1]): name for name in names if (found := _OF_STAGE3.fullmatch(name))}
        if not optims:
            raise EngineError(
                f"`{self.folder}` has no *zero_pp_rank_*_optim_states.pt; a checkpoint of ZeRO "
                "stages 1, 2 and 3 has one for each rank"
            )
        self._optims = [
            self._load(name)["optimizer_state_dict"] for name in self._each(optims, "optim_states")
        ]
        first = self._optims[0]
        self.stage = int(first["zero_stage"])
        counts = first["partition_count"]
        count = max(counts) if isinstance(counts, (list, tuple)) else counts
        self._check_count(count, len(optims), "optim_states")
        if self.stage == 3:
            self._check_count(count, len(models), "model_states")
            self._models = [self._load(name) for name in self._each(models, "model_states")]
        else:
            self._models = [self._load(_OF_ALL)]
        self.model = self._models[0]
        # In stage 3 the base optimizer's states lie beside the flat weights.
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        self._bases = [optim[key] for optim in self._optims]
        if not isinstance(self._bases[0], dict):
            raise EngineError(
                f"`{self.folder}` was saved with zero_optimization.elastic_checkpoint, which is "
                "not read; save it without"
            )
        flats = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self._masters = [optim[flats] for optim in self._optims]
        self._fragments = self._in_stage3() if self.stage == 3 else self._by_mapping()

    @property
    def shapes(self):
        """The trained parameters' shapes, by name."""
        return {
            name: tuple(shape)
            for group in self.model["param_shapes"]
            for name, shape in group.items()
        }

    @property
    def frozen(self):
        """The names of parameters that are not trained."""
        buffers, shared = set(self.model["buffer_names"]), self.model["shared_params"]
        known = self.shapes.keys() | buffers | shared.keys()
        return [name for name in self.model["module"] if name not in known]

    @property
    def groups(self):
        """The optimizer's groups, as torch has them."""
        return self._bases[0]["param_groups"]

    @property
    def loss_scaler(self):
        """The fields of the loss scaler."""
        return vars(self._optims[0]["loss_scaler"])

    @property
    def client_state(self):
        """What the caller saved beside the model."""
        return {name: value for name, value in self.model.items() if name not in _OWN}

    def master(self, name):
        """A trained parameter's master weights."""
        return self._joined(name, lambda rank, flat: self._masters[rank][flat])

    def states(self, name):
        """The names of a trained parameter's optimizer states that are tensors of its shape."""
        _, flat, *_ = self._fragments[name][0]
        return [
            key for key, value in self._state(0, flat).items()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        ]

    def state(self, name, key):
        """One of them."""
        return self._joined(name, lambda rank, flat: self._state(rank, flat)[key])

    def steps(self, name):
        """How often a trained parameter was updated."""
        rank, flat, *_ = self._fragments[name][0]
        applied = self.model["global_steps"] - self.model["skipped_steps"]
        group = next(
            group for group in self.groups if self._id(rank, flat) in group["params"]
        )
        return int(self._state(rank, flat).get("step", group.get("step", applied)))

    def weights(self, name):
        """The weights of a parameter that is not trained."""
        fragments = [model["frozen_param_fragments"] for model in self._models]
        if self.stage < 3 or not fragments[0]:
            return self.model["module"][name]
        shape = self.model["frozen_param_shapes"][name]
        flat = torch.cat([fragment[name].reshape(-1) for fragment in fragments])
        return self._of_shape(name, flat, tuple(shape))

    def _joined(self, name, flat_of):
        parts = [
            flat_of(rank, flat)[start : start + numel]
            for rank, flat, start, numel in self._fragments[name]
        ]
        return self._of_shape(name, torch.cat(parts), self.shapes[name])

    def _of_shape(self, name, flat, shape):
        numel = torch.Size(shape).numel()
        if flat.numel() < numel:
            raise EngineError(
                f"`{self.folder}` has {flat.numel()} of the {numel} elements of `{name}`"
            )
        return flat[:numel].reshape(shape)

    def _id(self, rank, flat):
        ids = [number for group in self._bases[rank]["param_groups"] for number in group["params"]]
        return ids[flat]

    def _state(self, rank, flat):
        return self._bases[rank]["state"].get(self._id(rank, flat), {})

    def _by_mapping(self):
        """Stages 1 and 2: a group is one flat tensor, cut into a part a rank; each rank says where
        in its part its share of each parameter is. By name: rank, group, first element, number."""
        fragments = {name: [] for name in self.shapes}
        for rank, optim in enumerate(self._optims):
            for group, mapping in enumerate(optim["param_slice_mappings"]):
                for name, place in mapping.items():
                    fragments[name].append((rank, group, place.start, place.numel))
        missing = [name for name, found in fragments.items() if not found]
        if missing:
            raise EngineError(f"no file of `{self.folder}` says where `{missing[0]}` lies")
        return fragments

    def _in_stage3(self):
        """Stage 3: each parameter is cut into equal parts, the last of them padded; a rank's parts
        follow on each other in the order of the shapes, over its flat tensors."""
        ranks = len(self._optims)
        ends, fragments, at = [], {}, 0
        for flat in self._masters[0]:
            ends.append((ends[-1] if ends else 0) + flat.numel())
        for name, shape in self.shapes.items():
            part = -(-torch.Size(shape).numel() // ranks)
            fragments[name] = []
            for rank in range(ranks):
                begin, end = at, at + part
                for flat, stop in enumerate(ends):
                    start = ends[flat - 1] if flat else 0
                    first, last = max(begin, start), min(end, stop)
                    if first < last:
                        fragments[name].append((rank, flat, first - start, last - first))
            at += part
        if at != ends[-1]:
            raise EngineError(
                f"`{self.folder}` has {ends[-1]} elements a rank, and its parameters {at}"
            )
        return fragments

    def _load(self, name):
        path = self.folder / name
        try:
            with torch.serialization.safe_globals(_KNOWN):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except FileNotFoundError:
            raise EngineError(f"`{self.folder}` has no `{name}`") from None
        except Exception as error:
            raise EngineError(f"`{path}` is not read: {error}") from error

    def _each(self, by_rank, what):
        ranks = range(max(by_rank, default=-1) + 1)
        missing = [rank for rank in ranks if rank not in by_rank]
        if missing:
            raise EngineError(f"`{self.folder}` has no *zero_pp_rank_{missing[0]}_*_{what}.pt")
        return [by_rank[rank] for rank in ranks]

    def _check_count(self, expected, found, what):
        if expected != found:
            raise EngineError(
                f"`{self.folder}` was saved by {expected} ranks, and has {found} *_{what}.pt"
            )


def _refuse_others(folder, names):
    others = [
        (r".*mp_rank_(?!00)\d+.*", "tensor-parallel ranks"),
        (r"layer_.*", "a pipeline"),
        (r".*expert_.*", "experts"),
    ]
    for pattern, what in others:
        found = next((name for name in names if re.fullmatch(pattern, name)), None)
        if found is not None:
            raise EngineError(f"`{folder}/{found}` is of {what}, which are not converted")
