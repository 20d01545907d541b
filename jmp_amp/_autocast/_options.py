"""The user's choices: rules for primitives and for scopes, regions in the code, and options of `autocast`."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Primitive

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import quote, shorten
from jmp_amp._formats import FLOAT32, FORMATS, Format, parse_format
from jmp_amp._ops import RULES, Demand, OpClass, ResultKind, Rule, RuleOf, Rules


@dataclasses.dataclass(frozen=True)
class Overrides:
    """The argument `rules`, parsed. Those of equal arguments are equal.

    Attributes:
        rules: the argument.
        primitives: rules by the name of the primitive.
        scopes: formats by pattern. If several match a scope, the last one counts.
    """

    rules: tuple[tuple[Any, Any], ...]
    primitives: Rules = dataclasses.field(compare=False)
    scopes: Mapping[str, Format] = dataclasses.field(compare=False)

    def matching(self, path: str) -> list[str]:
        """Returns the patterns that match a scope or one around it."""
        paths = [f"{path[i:]}/" for i, c in enumerate("/" + path) if c == "/"]
        return [pattern for pattern in self.scopes if any(matches_scope(p, f"{pattern}/*") for p in paths)]


def matches_scope(scope: str, pattern: str) -> bool:
    """Whether a pattern matches a whole scope: `*` is any characters, `?` one, and `[12]` one of two, or itself."""
    as_names = pattern.replace("[", "[[]")  # `layers[0]`
    return fnmatch.fnmatchcase(scope, pattern) or fnmatch.fnmatchcase(scope, as_names)


def parse_rules(rules: Mapping[Any, Any]) -> Overrides:
    """Parses a mapping from primitives to classes, and from patterns of scopes to `"full"` or a compute dtype.

    Raises:
        TypeError: a key is neither a primitive nor a string.
        ValueError: a value is not a class that the primitive can have, or not a dtype that autocast computes in.
    """
    primitives: dict[str, Rule | RuleOf] = {}
    scopes = {}
    for key, value in rules.items():
        if isinstance(key, Primitive):
            # JAX exports `psum`, but not its variant under `shard_map` with types.
            names = {key.name} | ({f"{key.name}_invariant"} & RULES.keys())
            primitives |= {name: _override(name, value) for name in names}
        elif isinstance(key, str):
            pattern = key.strip("/").removeprefix("*/").removesuffix("/*")  # a pattern may start at any scope
            scopes[pattern] = _format_of_scopes(key, value)
        else:
            raise TypeError(
                "a rule is for a primitive (`lax.tanh_p`) or for a pattern of scopes ('decoder/*'), "
                f"got {quote(key)} of type {type(key).__name__}"
            )
    return Overrides(tuple(rules.items()), primitives, scopes)


def _format_of_scopes(pattern: str, value: Any) -> Format:
    if isinstance(value, str) and value == "full":
        return FORMATS["float32"]
    try:
        return parse_format(value).at_any_size
    except (TypeError, ValueError):
        raise ValueError(
            f'the rule of the scopes `{shorten(pattern)}` must be "full" or a dtype that autocast computes in '
            f'({", ".join(FORMATS)}), got {quote(value)}; write `rules={{{quote(pattern)}: "full"}}`. A class such as '
            '"lower" is for a primitive: `rules={lax.tanh_p: "lower"}`'
        ) from None


def _override(name: str, value: Any) -> RuleOf:
    """Returns the rule of a primitive with another class; its other properties stay as in the table."""
    try:
        op_class = OpClass(value)
    except ValueError:
        classes = ", ".join(each.value for each in OpClass)
        raise ValueError(f"the class of `{name}` must be one of {classes}, got {quote(value)}") from None
    known = RULES.get(name, Rule(OpClass.ORIGINAL, dtype_params=("preferred_element_type",)))
    is_as_traced = name in RULES and isinstance(known, Rule) and known.op_class is OpClass.ORIGINAL
    if is_as_traced and op_class not in (OpClass.FULL, OpClass.ORIGINAL):
        raise ValueError(
            f"`{name}` runs in the dtypes that it was traced in: its class can be `full` or `original`, "
            f"got {quote(value)}; where it takes 16 bits, cast its operands in the function"
        )

    def rule(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
        rule = known if isinstance(known, Rule) else known(params, avals)
        # The program asks for the dtype of this op, by a cast or by `precision`.
        is_asked = rule is not known and rule.op_class is OpClass.ORIGINAL
        return rule if is_asked else _with_class(rule, op_class, avals)

    return rule


def _with_class(rule: Rule, op_class: OpClass, avals: Sequence[Any]) -> Rule:
    rule = rule._replace(demand=Demand.NONE, terms=0)  # the class is all that the user asks for
    if op_class is OpClass.LOWER:  # rounds the result, even if its readers read float32
        return rule._replace(op_class=op_class, kind=ResultKind.OTHER if rule.moves else rule.kind, fuses=False)
    several = sum(getattr(aval, "dtype", None) == FLOAT32 for aval in avals) > 1
    if op_class is OpClass.FOLLOW and rule.op_class is not OpClass.FOLLOW and several:
        op_class = OpClass.PROMOTE  # all operands of an op must have one dtype
    return rule._replace(op_class=op_class)


def format_in(name_stack: Any) -> Format | None:
    """Returns the format of the innermost region in a name stack; None outside of regions."""
    return next((FORMATS[mark].at_any_size for mark in reversed(jx.marks_in(name_stack)) if mark in FORMATS), None)


class Options(NamedTuple):
    """The arguments of `autocast` that hold for a whole function.

    Attributes:
        overrides: `rules`, parsed.
        saves_products: whether bodies of scans keep only the results of products and other costly ops.
        has_float32_grads: whether the products that compute the gradients of weights return float32.
        has_low_stream: whether residual streams are stored in the compute dtype.
        keeps_checkpoints: whether the backward pass computes again what a `jax.checkpoint` of the program says.
    """

    overrides: Overrides
    saves_products: bool
    has_float32_grads: bool
    has_low_stream: bool
    keeps_checkpoints: bool = True
