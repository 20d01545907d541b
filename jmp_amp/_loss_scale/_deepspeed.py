"""Conversion of the `fp16` section of a DeepSpeed config to arguments of `LossScale.deepspeed`."""

import difflib
import numbers
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from jmp_amp._loss_scale._arguments import LARGEST_SCALE, SMALLEST_SCALE


def deepspeed_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `LossScale.deepspeed` for a DeepSpeed config.

    Defaults and parsing are those of DeepSpeed's pydantic model: `"128"` is a number, `16.0` an integer, `"true"` a
    bool, and `"auto"` the default. Unused values, such as the window of a static scale, may be out of range.

    Examples:
        >>> deepspeed_arguments({"fp16": {"enabled": True, "loss_scale": "128"}})
        {'init_scale': 128.0, 'min_scale': 128.0, 'max_scale': 128.0}
    """
    section = _section(config)
    values = {name: _parse(name, section[name]) if name in section else _FIELDS[name][0] for name in _FIELDS}
    if not values["enabled"]:
        return _static(1.0)
    if values["loss_scale"]:
        return _static(_in_range("loss_scale", values))
    init_scale, min_scale = 2.0 ** _in_range("initial_scale_power", values), _in_range("min_loss_scale", values)
    return {
        "init_scale": max(init_scale, min_scale),
        "growth_interval": _in_range("loss_scale_window", values),
        "hysteresis": _in_range("hysteresis", values),
        "consecutive_hysteresis": values["consecutive_hysteresis"],
        "min_scale": min_scale,
    }


def _section(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | bytes | os.PathLike):
        raise TypeError(f"`config` must be a mapping, got {config!r}; load the file first with `json.load(file)`")
    if not isinstance(config, Mapping):
        raise TypeError(f'`config` must be a mapping such as `{{"fp16": {{"enabled": True}}}}`, got {config!r}')
    misplaced = [name for name in _FIELDS if name in config]
    if misplaced and "fp16" not in config:
        raise ValueError(
            f"`{misplaced[0]}` belongs in the section `fp16`, but `config` has no such section; "
            'pass the whole config, or `{"fp16": section}`'
        )
    section = config.get("fp16", {})
    if not isinstance(section, Mapping):
        raise TypeError(f"`fp16` must be a mapping, got {section!r}")
    for name in section:
        if not isinstance(name, str):
            raise TypeError(f"the keys of `fp16` must be strings, got {name!r}. Allowed: {', '.join(_FIELDS)}.")
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, 1)
            hint = f"; did you mean `{near[0]}`?" if near else "."
            raise ValueError(f"`fp16.{name}` is not known{hint} Allowed: {', '.join(_FIELDS)}.")
    return section


def _parse(name: str, value: Any) -> Any:
    default, _, parse = _FIELDS[name]
    if isinstance(value, str) and value == "auto":
        if name != "enabled":
            return default
        # DeepSpeed reads "auto" as false. A user who expects a trainer to replace it would get no loss scaling.
        raise ValueError("`fp16.enabled` must be true or false, got 'auto', a placeholder for trainers; set it")
    try:
        return parse(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise _error(name, value) from None


def _in_range(name: str, values: Mapping[str, Any]) -> Any:
    minimum, maximum = _RANGES[name]
    if not minimum <= values[name] <= maximum:
        raise _error(name, values[name])
    return values[name]


def _error(name: str, value: Any) -> ValueError:
    return ValueError(f"`fp16.{name}` must be {_FIELDS[name][1]}, got {reprlib.repr(value)}")


def _static(scale: float) -> dict[str, Any]:
    return {"init_scale": scale, "min_scale": scale, "max_scale": scale}


def _to_bool(value: Any) -> bool:
    return _BOOLS[value.lower() if isinstance(value, str) else value]


def _to_float(value: Any) -> float:
    if isinstance(value, str | numbers.Real):
        return float(value)
    raise TypeError


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        return int(re.sub(r"\.0+\s*$", "", value))
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


# The key 1 also matches True and 1.0, since they are equal and have the same hash.
_BOOLS: dict[Any, bool] = {
    **dict.fromkeys((1, "1", "t", "true", "y", "yes", "on"), True),
    **dict.fromkeys((0, "0", "f", "false", "n", "no", "off"), False),
}

_SCALE_RANGE, _COUNT_RANGE = (SMALLEST_SCALE, LARGEST_SCALE), (1, 2**31 - 1)
_A_SCALE = "a number from 2^-126 to 2^126, so that float32 holds its reciprocal"
_A_COUNT = "an integer from 1 to 2^31 - 1"

_RANGES: dict[str, tuple[float, float]] = {
    "loss_scale": _SCALE_RANGE,
    "initial_scale_power": (-126, 126),
    "loss_scale_window": _COUNT_RANGE,
    "hysteresis": _COUNT_RANGE,
    "min_loss_scale": _SCALE_RANGE,
}

# The default, the allowed values as an error message states them, and the parser.
_FIELDS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "enabled": (False, "true or false", _to_bool),
    "auto_cast": (False, "true or false", _to_bool),
    "loss_scale": (0.0, f"0 (dynamic) or {_A_SCALE}", _to_float),
    "initial_scale_power": (16, "an integer from -126 to 126", _to_int),
    "loss_scale_window": (1000, _A_COUNT, _to_int),
    "hysteresis": (2, _A_COUNT, _to_int),
    "consecutive_hysteresis": (False, "true or false", _to_bool),
    "min_loss_scale": (1.0, _A_SCALE, _to_float),
    "fp16_master_weights_and_grads": (False, "true or false", _to_bool),
}
