"""Figures read off the text of an optimized and scheduled HLO module, of a GPU or of a TPU."""

import collections
import itertools
import math
import re
from typing import NamedTuple

NBYTES = {
    "f64": 8,
    "s64": 8,
    "u64": 8,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f16": 2,
    "bf16": 2,
    "s16": 2,
    "u16": 2,
    "s8": 1,
    "u8": 1,
    "pred": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "f8e8m0fnu": 1,
    "c64": 8,
}
# An array, and whether its layout names another memory space than the device's: the vector memory of a TPU, the host's.
_ARRAY = re.compile(
    r"\b(" + "|".join(sorted(NBYTES, key=len, reverse=True)) + r")\[([\d,]*)\](\{[^{}]*S\([1-9]\d*\)\})?"
)
_COMPUTATION = re.compile(r"(ENTRY )?(%[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_NAME = re.compile(r"%[\w.\-]+")
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id"}
_CONTROL = {"while", "conditional", "call"}
_COPIES = {"copy-start", "slice-start"}  # between the memory spaces of a TPU
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_COLLECTIVES)})(?:-start)?\(")


class Instruction(NamedTuple):
    """An instruction, how often the module runs it, and the types of its operands as text."""

    op: str
    times: int
    type_text: str
    operands: list[str]
    line: str


def computations(text):
    """{name: lines} of every computation in the HLO text, and the entry's name."""
    bodies, entry, name = {}, None, None
    for line in text.splitlines():
        if (m := _COMPUTATION.match(line)) and "->" in line:
            name = m.group(2)
            bodies[name] = []
            entry = name if m.group(1) else entry
        elif line.startswith("}"):
            name = None
        elif name:
            bodies[name].append(line)
    return bodies, entry


def instructions(bodies, name, times=1):
    """Yields the instructions of a computation and of all that it runs: loops, branches and fusions."""
    types = {}
    for line, result, type_text, op, operands in _parsed(bodies[name]):
        types[result] = type_text
        yield Instruction(op, times, type_text, [types[operand] for operand in operands if operand in types], line)
        for body in _called(line) if op in _CONTROL else _fused(line):
            if body in bodies:
                yield from instructions(bodies, body, times * _times(bodies, line))


def _parsed(lines):
    """Yields (line, name of the result, its type, op, names of the operands) of each line that is an instruction."""
    for line in lines:
        if m := _INSTRUCTION.match(line):
            *parts, rest = m.groups()
            yield line, *parts, _NAME.findall(rest.split("), ")[0])


def _called(line):
    """The computations that a loop, a branch or a call runs."""
    named = re.findall(
        r"(?:body|to_apply|true_computation|false_computation|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)", line
    )
    return [name for group in named for name in group.split(", ")]


def _fused(line):
    return re.findall(r"calls=(%[\w.\-]+)", line)


def _times(bodies, line):
    """The trip count of a loop: the one that a GPU's module states, or the one that a TPU's loop compares with."""
    if " while(" not in line:
        return 1
    if trips := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(trips.group(1))
    condition = "\n".join(bodies[re.search(r"condition=(%[\w.\-]+)", line).group(1)])
    limits = re.findall(r"s32\[\]\S* constant\((\d+)\)", condition)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in condition else 1


def _nbytes(type_text, anywhere=False):
    """The bytes of the arrays in the device's memory, or `anywhere`."""
    return sum(size for size, outside in _arrays(type_text) if anywhere or not outside)


def _arrays(type_text):
    for dtype, dims, outside in _ARRAY.findall(type_text):
        yield NBYTES[dtype] * math.prod(int(d) for d in filter(None, dims.split(","))), bool(outside)


def _traffic(bodies, name):
    """(kernels by op, bytes moved) of one run of a computation. A loop counts its body times its known trip
    count (once where unknown); a conditional counts its dearest branch."""
    sizes, kinds, moved = {}, collections.Counter(), 0
    for line, result, type_text, op, args in _parsed(bodies[name]):
        sizes[result] = _nbytes(type_text)
        if op in _FREE or "AllocateBuffer" in line:
            continue
        if op in _CONTROL:
            if branches := [_traffic(bodies, b) for b in _called(line) if b in bodies]:
                n = _times(bodies, line)
                inner_kinds, inner_moved = max(branches, key=lambda b: b[1])
                moved += n * inner_moved
                for kind, count in inner_kinds.items():
                    kinds[kind] += n * count
            continue
        operands = [sizes.get(arg, 0) for arg in args]
        fused = [body for body in _fused(line) if body in bodies and op in ("fusion", "fusion-start")]
        if not op.endswith(("-update", "-done")):
            kinds[op.removesuffix("-start")] += 1
        if op in _COPIES:
            moved += _copied(type_text)
        elif fused:
            reads, written = _fusion_traffic(bodies, fused[0], operands)
            moved += sum(reads) + written
        elif op.endswith("-done"):
            moved += 0 if op in ("fusion-done", "copy-done", "slice-done") else sizes[result]
        elif op.endswith(("-start", "-update")):  # the result is that of `-done`
            moved += sum(operands)
        else:
            moved += sizes[result] + sum(operands)
    return kinds, moved


def _copied(type_text):
    """Bytes of a copy of an array, or of a slice of one, of which one side may be outside the device's memory."""
    (source, outside), (target, target_outside) = itertools.islice(_arrays(type_text), 2)
    return min(source, target) * (2 - outside - target_outside)


def _fusion_traffic(bodies, name, operands):
    """Bytes that a fusion reads of each operand, and bytes that it writes. A parameter that is only sliced counts its
    slices, one that is only updated in place counts the update on the way out."""
    sizes, index, sliced, written = {}, {}, [0] * len(operands), 0
    for line, result, type_text, op, args in _parsed(bodies[name]):
        sizes[result] = _nbytes(type_text)
        if "ROOT" in line:
            written += sizes[result]
        if op == "parameter":
            index[result] = int(re.search(r" parameter\((\d+)", line).group(1))
            continue
        renames = op in ("bitcast", "reshape") or "output_to_operand_aliasing={{}: (0, {})}" in line
        if renames and args[0] in index:
            index[result] = index[args[0]]
            continue
        if op == "fusion":
            inner, inner_written = _fusion_traffic(bodies, _fused(line)[0], [sizes.get(arg, 0) for arg in args])
            written -= (sizes[result] - inner_written) * ("ROOT" in line)
        else:
            inner = [sizes.get(arg, 0) for arg in args]
            if op == "dynamic-slice":
                inner[0] = sizes[result]
            elif op == "dynamic-update-slice" and args[0] in index:
                written -= sizes[result] - sizes.get(args[1], 0)
                inner[0] = 0
        for arg, read in zip(args, inner, strict=True):
            if arg in index:
                sliced[index[arg]] += read
    return [min(pair) for pair in zip(operands, sliced, strict=True)], max(written, 0)


def collectives(compiled):
    """Yields (operation, times, {dtype: bytes}) for every collective: how often a step runs it, and what one device
    hands in each time. In loops they count as in `cost`; those in the branches of a conditional count all."""
    for op, times, _, operands, _ in instructions(*computations(compiled.as_text())):
        if (op := op.removesuffix("-start")) in _COLLECTIVES:
            handed_in = collections.Counter()
            for operand in operands:
                handed_in[_dtype_and_shape(operand)[0]] += _nbytes(operand)
            yield op, times, dict(handed_in)


def products(compiled):
    """Yields (times, FLOPs of one run, dtypes of the operands) for every matrix product and every convolution. The
    dtypes are those that it multiplies: a cast that is fused into it comes before. In loops they count as in `cost`;
    those in the branches of a conditional count all."""
    for op, times, type_text, operands, line in instructions(*computations(compiled.as_text())):
        is_call = op == "custom-call"
        if op == "dot" or (is_call and "__cublas" in line):
            flops = _flops_of_dot
        elif op == "convolution" or (is_call and "__cudnn$conv" in line):
            flops = _flops_of_convolution
        else:
            continue
        (lhs, lhs_shape), (rhs, rhs_shape), (_, shape) = map(_dtype_and_shape, (*operands[:2], type_text))
        yield times, flops(line, lhs_shape, rhs_shape, shape), (lhs, rhs)


def _flops_of_dot(line, lhs, rhs, result):
    axes = re.search(r"lhs_contracting_dim\w+\"?[=:]([\[{][\d\",]*)", line).group(1)
    return 2 * math.prod(lhs[int(axis)] for axis in re.findall(r"\d+", axes)) * math.prod(result)


def _flops_of_convolution(line, lhs, rhs, result):
    """Two for each pair of values that are multiplied; where a window meets padding or a hole there is none."""
    if "BackwardFilter" in line:  # cuDNN states the labels and the window of the forward pass for all three
        rhs, result = result, rhs
    elif "BackwardInput" in line:
        lhs, result = result, lhs
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line).groups()
    lhs, rhs, result = (
        dict(zip(names, shape, strict=True)) for names, shape in zip(labels, (lhs, rhs, result), strict=True)
    )
    flops = 2 * result["b"] * result["f"] * rhs["i"]
    windows = re.findall(r"window=\{([^}]*)\}", line)  # none where there are no axes to slide along
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", "".join(windows)))
    for axis in range(len(lhs) - 2):

        def field(name, default, axis=axis):
            return window[name].split("x")[axis] if name in window else default

        stride, lhs_step, rhs_step = (int(field(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        before = int(field("pad", "0_0").split("_")[0])
        positions = (
            out * stride + tap * rhs_step - before for out in range(result[str(axis)]) for tap in range(rhs[str(axis)])
        )
        flops *= sum(at % lhs_step == 0 and 0 <= at // lhs_step < lhs[str(axis)] for at in positions)
    return flops


def _dtype_and_shape(type_text):
    """The dtype and the shape of an array, or of the first of a tuple."""
    dtype, shape, _ = _ARRAY.search(type_text).groups()
    return dtype, [int(size) for size in filter(None, shape.split(","))]


def cost(compiled):
    """Figures read off the scheduled HLO. `bytes_moved` counts, for every instruction that runs a kernel, what it
    reads plus what it writes: an upper estimate of device-memory traffic, by the same rule for every program, so
    good for ratios."""
    text = compiled.as_text()
    bodies, entry = computations(text)
    kinds, moved = _traffic(bodies, entry)
    memory = compiled.memory_analysis()
    return {
        "kernels": sum(kinds.values()),
        "kinds": dict(kinds),
        "bytes_moved": moved,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "conditionals": len(re.findall(r" conditional\(", text)),
        "loops": len(re.findall(r" while\(", text)),
        "collectives": [f"{op} {t}" for t, op in _COLLECTIVE.findall(text)],
    }


def fused_by_triton(compiled):
    """How many different kernels Triton compiles, those of products left out: fused norms and softmaxes."""
    bodies, _ = computations(compiled.as_text())
    names = re.compile(r"%[\w.\-]+|, metadata=\{[^}]*\}")
    kernels = set()
    for line in (line for body in bodies.values() for line in body):
        if '"kind":"__triton"' in line:
            kernels |= {names.sub("", "\n".join(bodies[body])) for body in _fused(line)}
    return len(kernels)
