"""Tensor names between a format and ours, and the one error that lists all that does not fit."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from pallasite.models.config import ModelConfig, TensorSpec
from pallasite.models.tensors import Fused, KeyTable

LISTED = 12
"""Names written out of each kind of mismatch; a wrong config.json can make hundreds, and the count tells the rest."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one of our tensors stands: the format's tensor `key`, and of a fused one the columns [N] that are ours."""

    key: str
    columns: np.ndarray | None = None

    def runs(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of each run of neighbouring columns, in our order; n: columns of ours."""
        if self.columns is None:
            yield 0, n
            return
        for run in np.split(self.columns, np.flatnonzero(np.diff(self.columns) != 1) + 1):
            yield int(run[0]), int(run[-1]) + 1


def places(keys: KeyTable, names: Iterable[str], config: ModelConfig) -> dict[str, Place]:
    """Where each of our `names` stands in the format, by its key table (models/tensors.py).

    Raises KeyError for a name that no pattern covers: the table is incomplete.
    """
    patterns: list[tuple[re.Pattern[str], str, np.ndarray | None]] = []
    for their, our in keys.items():
        parts = zip(our.parts, our.columns(config), strict=True) if isinstance(our, Fused) else [(our, None)]
        for part, columns in parts:
            regex = re.escape(part).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{leaf\}", r"(?P<leaf>weight|bias)")
            patterns.append((re.compile(regex), their, columns))
    found = {}
    for name in names:
        for pattern, their, columns in patterns:
            match = pattern.fullmatch(name)
            if match:
                found[name] = Place(their.format(**match.groupdict()), columns)
                break
        else:
            raise KeyError(f"no pattern of the key table gives {name!r}")
    return found


def stored_specs(placed: Mapping[str, Place], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """What each of the format's tensors must be, by its key: the spec of ours, of a fused one with all columns."""
    stored: dict[str, TensorSpec] = {}
    for name, place in placed.items():
        spec = specs[name]
        if place.columns is not None and place.key in stored:
            *rest, n = stored[place.key].shape
            spec = dataclasses.replace(spec, shape=(*rest, n + spec.shape[-1]))
        stored[place.key] = spec
    return stored


def shape_problem(name: str, found: tuple[int, ...], spec: TensorSpec) -> str | None:
    """A line saying how the shape of `name` differs from its spec, in the order the format stores it; None if equal."""
    expected = spec.shape[::-1] if is_transposed(spec) else spec.shape
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
