"""Autocast: a function traced to a jaxpr, whose ops then run each in the dtype of its class."""

from jmp_amp._autocast._analyses import DEMAND_OF
from jmp_amp._autocast._api import AutocastOptions, autocast, autocast_with, full_precision, parse_settings, precision
from jmp_amp._autocast._explain import OpSite, Steps, explain_call, flops_of
from jmp_amp._autocast._options import matches_scope, parse_rules
