"""What DeepSpeed's engine has and this one has not yet, refused with what there is instead."""


class Later:
    """Methods that raise NotImplementedError."""

    def offload_states(self, *args, **kwargs):
        """Not there yet."""
        raise NotImplementedError(
            "offload_states: what the engine holds stays in memory; a higher "
            "`zero_optimization.stage` leaves less of it on each rank"
        )

    def reload_states(self, *args, **kwargs):
        """Not there yet."""
        raise NotImplementedError("reload_states: nothing can be offloaded yet")
