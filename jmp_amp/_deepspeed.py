"""The `fp16` section of a DeepSpeed config, as arguments of `LossScale.deepspeed`."""

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any


def arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that make the loss scale of a DeepSpeed config; its defaults are DeepSpeed's."""
    section = config.get("fp16", {})
    if not isinstance(section, Mapping):
        raise TypeError(f"`fp16` must be a mapping, got {section!r}")
    unknown = sorted(set(section) - set(_FIELDS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], _FIELDS, 1)
        hint = f"; did you mean `{near[0]}`?" if near else "."
        raise ValueError(f"`fp16.{unknown[0]}` is not known{hint} Allowed: {', '.join(_FIELDS)}.")
    values = {name: section.get(name, default) for name, (default, _, _) in _FIELDS.items()}
    for name, (_, allowed, holds) in _FIELDS.items():
        if not holds(values[name]):
            raise ValueError(f"`fp16.{name}` must be {allowed}, got {values[name]!r}")
    if not values["enabled"]:
        return _static(1.0)
    if values["loss_scale"]:
        return _static(values["loss_scale"])
    init_scale, min_scale = 2.0 ** values["initial_scale_power"], float(values["min_loss_scale"])
    return {
        "init_scale": max(init_scale, min_scale),
        "growth_interval": values["loss_scale_window"],
        "hysteresis": values["hysteresis"],
        "consecutive_hysteresis": values["consecutive_hysteresis"],
        "min_scale": min_scale,
    }


def _static(scale: float) -> dict[str, Any]:
    return {"init_scale": scale, "min_scale": scale, "max_scale": scale}


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(least: int, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


# Default, what is allowed, and whether it is that.
_FIELDS: dict[str, tuple[Any, str, Callable[[Any], bool]]] = {
    "enabled": (False, "a bool", _is_bool),
    "auto_cast": (False, "a bool", _is_bool),
    "loss_scale": (0, "a finite number of at least 0 (0 is dynamic)", _is_number),
    "initial_scale_power": (16, "an integer from 0 to 126", _is_count(0, 126)),
    "loss_scale_window": (1000, "an integer of at least 1", _is_count(1)),
    "hysteresis": (2, "an integer of at least 1", _is_count(1)),
    "consecutive_hysteresis": (False, "a bool", _is_bool),
    "min_loss_scale": (1, "an integer of at least 1", _is_count(1)),
    "fp16_master_weights_and_grads": (False, "a bool", _is_bool),
}
