"""Where DeepSpeed has its schedules: `runtime.lr_schedules`."""

from oxizero.runtime import lr_schedules

__all__ = ["lr_schedules"]
