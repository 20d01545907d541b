"""The loss scale that a DeepSpeed config describes."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jmp_amp._calls import quote, shorten
from jmp_amp._loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale

__all__ = ["from_config"]


def from_config(config: Mapping[str, Any]) -> LossScale:
    """Returns the rule that a DeepSpeed config describes.

    Args:
        config: the whole config. Its section `fp16` is read: `enabled`, `loss_scale` (0 is dynamic),
            `initial_scale_power`, `loss_scale_window`, `hysteresis`, `consecutive_hysteresis` and `min_loss_scale`.
            Defaults and parsing are those of DeepSpeed's pydantic model: `"128"` is a number, `16.0` an integer,
            `"true"` a bool, and `"auto"` the default (except for `enabled`). Unused values, such as the window of a
            static scale, may be out of range. `auto_cast` and `fp16_master_weights_and_grads` do not affect the loss
            scale. If the section is missing or not enabled, the result does not scale.

    Raises:
        TypeError: the config or its section is not a mapping (load a file with `json` first), or a key of the section
            is not a string.
        ValueError: `config` is only the section, a key is unknown, or a value is out of range; the message names
            `fp16.<key>`.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.interop.deepspeed.from_config({"fp16": {"enabled": True, "initial_scale_power": 12}})
        >>> rule == amp.LossScale.deepspeed(init_scale=2.0**12)
        True
    """
    section = _section(config)
    values = {name: _parse(name, section.get(name, field.default)) for name, field in _FIELDS.items()}
    if not values["enabled"] or values["loss_scale"]:
        scale = _in_range("loss_scale", values) if values["enabled"] else 1.0
        return LossScale.deepspeed(init_scale=scale, min_scale=scale, max_scale=scale)
    init_scale, min_scale = 2.0 ** _in_range("initial_scale_power", values), _in_range("min_loss_scale", values)
    return LossScale.deepspeed(
        init_scale=max(init_scale, min_scale),
        growth_interval=_in_range("loss_scale_window", values),
        hysteresis=_in_range("hysteresis", values),
        consecutive_hysteresis=values["consecutive_hysteresis"],
        min_scale=min_scale,
    )


def _section(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | bytes | os.PathLike):
        raise TypeError(f"`config` must be a mapping, got {quote(config)}; load the file first with `json.load(file)`")
    if not isinstance(config, Mapping):
        raise TypeError(f'`config` must be a mapping such as `{{"fp16": {{"enabled": True}}}}`, got {quote(config)}')
    misplaced = [name for name in _FIELDS if name in config]
    if misplaced and "fp16" not in config:
        raise ValueError(
            f"`{misplaced[0]}` belongs in the section `fp16`, but `config` has no such section; "
            'pass the whole config, or `{"fp16": section}`'
        )
    section = config.get("fp16", {})
    if not isinstance(section, Mapping):
        raise TypeError(f"`fp16` must be a mapping, got {quote(section)}")
    for name in section:
        if not isinstance(name, str):
            raise TypeError(f"the keys of `fp16` must be strings, got {quote(name)}. Allowed: {', '.join(_FIELDS)}.")
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, 1)
            hint = f"; did you mean `{near[0]}`?" if near else "."
            raise ValueError(f"`fp16.{shorten(name)}` is not known{hint} Allowed: {', '.join(_FIELDS)}.")
    return section


def _parse(name: str, value: Any) -> Any:
    field = _FIELDS[name]
    if isinstance(value, str) and value == "auto":
        if name != "enabled":
            return field.default
        # DeepSpeed reads "auto" as false. A user who expects a trainer to replace it would get no loss scaling.
        raise ValueError("`fp16.enabled` must be true or false, got 'auto', a placeholder for trainers; set it")
    try:
        return field.parse(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise _error(name, value) from None


def _in_range(name: str, values: Mapping[str, Any]) -> Any:
    if not _FIELDS[name].minimum <= values[name] <= _FIELDS[name].maximum:
        raise _error(name, values[name])
    return values[name]


def _error(name: str, value: Any) -> ValueError:
    return ValueError(f"`fp16.{name}` must be {_FIELDS[name].allowed}, got {quote(value)}")


def _to_bool(value: Any) -> bool:
    return _BOOLS[value.lower() if isinstance(value, str) else value]


_BOOLS = dict.fromkeys((1, "1", "t", "true", "y", "yes", "on"), True)  # True and 1.0 equal 1
_BOOLS |= dict.fromkeys((0, "0", "f", "false", "n", "no", "off"), False)


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        return int(re.sub(r"\.0+\s*$", "", value))
    if not float(value).is_integer():
        raise ValueError
    return int(value)


class _Field(NamedTuple):
    default: Any
    parse: Callable[[Any], Any]
    allowed: str  # the values that the error message names
    minimum: float = 0
    maximum: float = 1


_BOOL = _Field(False, _to_bool, "true or false")
_COUNT = _Field(None, _to_int, "an integer from 1 to 2^31 - 1", 1, 2**31 - 1)
_A_SCALE = "a number from 2^-126 to 2^126, so that float32 holds its reciprocal"

_FIELDS = {
    "enabled": _BOOL,
    "auto_cast": _BOOL,
    "loss_scale": _Field(0.0, float, f"0 (dynamic) or {_A_SCALE}", SMALLEST_SCALE, LARGEST_SCALE),
    "initial_scale_power": _Field(16, _to_int, "an integer from -126 to 126", -126, 126),
    "loss_scale_window": _COUNT._replace(default=1000),
    "hysteresis": _COUNT._replace(default=2),
    "consecutive_hysteresis": _BOOL,
    "min_loss_scale": _Field(1.0, float, _A_SCALE, SMALLEST_SCALE, LARGEST_SCALE),
    "fp16_master_weights_and_grads": _BOOL,
}
