"""Autocast: a function traced to a jaxpr, whose ops then run each in the dtype of its class."""

from jmp_amp._autocast._analyses import DEMAND_OF
from jmp_amp._autocast._api import (
    AutocastOptions,
    Settings,
    autocast,
    autocast_with,
    full_precision,
    parse_settings,
    planner_of,
    precision,
)
from jmp_amp._autocast._explain import Decision, Steps, decision_of, steps_of
from jmp_amp._autocast._options import matches_scope, parse_rules
