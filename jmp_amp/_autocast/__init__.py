"""Autocast: a function traced to a jaxpr, whose ops then run each in the dtype of its class."""

from jmp_amp._autocast._api import autocast, parse_settings
from jmp_amp._autocast._explain import explain_call
from jmp_amp._autocast._op_site import REASONS, OpSite
from jmp_amp._autocast._overrides import matches, parse_rules
from jmp_amp._autocast._regions import full_precision, precision
from jmp_amp._autocast._rule import OpClass, Reads, Rule
from jmp_amp._autocast._rules import RULES

__all__ = [
    "REASONS",
    "RULES",
    "OpClass",
    "OpSite",
    "Reads",
    "Rule",
    "autocast",
    "explain_call",
    "full_precision",
    "matches",
    "parse_rules",
    "parse_settings",
    "precision",
]
