"""Stage 3: what modules save and load is whole.

Torch calls a hook before a module saves or loads, and one after it; none where that fails. What was
held for it then is given up when the module saves or loads again, or with the next step.
"""

import weakref

from oxizero._oxizero import EngineError
from oxizero.calls import hold, let_go


class Saving:
    """The modules that save or load, from the outermost to the innermost."""

    def __init__(self):
        self._under_way = []
        # What a state dict has of a parameter.
        self.keep = _copy

    def watch(self, module, buckets):
        """The hooks for a module that has parameters of these buckets."""
        # A model does not keep its engine; a copy of it has its hooks, and is whole.
        own = weakref.ref(module)
        saving, buckets = weakref.ref(self), [weakref.ref(bucket) for bucket in buckets]

        def begin(module, is_load):
            alive = saving()
            if alive is not None and module is own():
                alive._begin(module, [bucket() for bucket in buckets], is_load)

        def end(module):
            alive = saving()
            if alive is not None and module is own():
                alive._end(module)

        def before_save(module, prefix, keep_vars):
            begin(module, False)

        def after_save(module, state_dict, prefix, local_metadata):
            alive = saving()
            keep = _copy if alive is None else alive.keep
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                if prefix + name in state_dict:
                    state_dict[prefix + name] = keep(param)
            end(module)

        def before_load(module, state_dict, prefix, metadata, *_):
            if metadata.get("assign_to_params_buffers"):
                raise EngineError(
                    "load_state_dict(assign=True) is refused: it replaces parameters that the "
                    "engine trains; leave it out"
                )
            begin(module, True)

        def after_load(module, incompatible_keys):
            end(module)

        return [
            module.register_state_dict_pre_hook(before_save),
            module.register_state_dict_post_hook(after_save),
            module.register_load_state_dict_pre_hook(before_load),
            module.register_load_state_dict_post_hook(after_load),
        ]

    def reset(self):
        """No module saves or loads: those that began have failed. What they loaded counts."""
        self._end(None)

    def _begin(self, module, buckets, is_load):
        if any(module is other for other, *_ in self._under_way):
            self.reset()
        hold(buckets)
        self._under_way.append((module, buckets, is_load))

    def _end(self, module):
        """Ends a module's, and those inside of it that have failed."""
        other = None
        while self._under_way and (module is None or other is not module):
            other, buckets, is_load = self._under_way.pop()
            if is_load:
                for bucket in buckets:
                    if bucket.written():
                        bucket.take_over()
            let_go(buckets)


def _copy(param):
    return param.detach().clone()
