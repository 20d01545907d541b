"""Autocast: a function traced to a jaxpr, whose ops then run each in the dtype of its class."""

from jmp_amp._autocast._api import autocast
from jmp_amp._autocast._regions import full_precision, precision

__all__ = ["autocast", "full_precision", "precision"]
