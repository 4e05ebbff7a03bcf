"""Tensor names between a format and ours, and the one error that lists all that does not fit.

A key table maps a format's names to ours, with {i} for a layer number and {leaf} for "weight" or "bias".
"""

import re
from collections.abc import Iterable, Mapping

from pallasite.models.config import TensorSpec

LISTED = 12
"""Names written out of each kind of mismatch; a wrong config.json can make hundreds, and the count tells the rest."""


def theirs(keys: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The format's name for each of our `names`, by the table `keys` (theirs -> ours).

    Raises KeyError for a name that no pattern covers: the family's table is incomplete.
    """
    patterns = []
    for their, our in keys.items():
        regex = re.escape(our).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{leaf\}", r"(?P<leaf>weight|bias)")
        patterns.append((re.compile(regex), their))
    found = {}
    for name in names:
        for pattern, their in patterns:
            match = pattern.fullmatch(name)
            if match:
                found[name] = their.format(**match.groupdict())
                break
        else:
            raise KeyError(f"no pattern of the key table gives {name!r}")
    return found


def shape_problem(name: str, found: tuple[int, ...], spec: TensorSpec, *, transposed: bool) -> str | None:
    """A line saying how the shape of `name` differs from its spec, in the order the format stores it; None if equal."""
    expected = spec.shape[::-1] if transposed else spec.shape
    return None if found == expected else f"{name}: {list(found)}, expected {list(expected)}"


def is_transposed(spec: TensorSpec) -> bool:
    """Whether HF and GGUF store this tensor as the transpose of ours: linears and the head are [N, K] there."""
    return spec.kind in ("linear", "head")


def refuse_problems(where: str, problems: Mapping[str, Iterable[str]]) -> None:
    """Raise one ValueError that lists every problem, by kind ("missing tensors", ...); return if there are none."""
    parts = []
    for kind, lines in problems.items():
        listed = sorted(lines)
        if listed:
            rest = f", and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
            parts.append(f"{kind} ({len(listed)}): {', '.join(listed[:LISTED])}{rest}")
    if parts:
        raise ValueError(f"{where} does not fit its configuration: " + "; ".join(parts))
