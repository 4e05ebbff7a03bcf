"""Quantizers: producers that turn float matrices into INT4 tensors."""

from pallasite.convert.produce import Producer
from pallasite.convert.quantize.rtn import RoundToNearest

METHODS: dict[str, type[Producer]] = {"int4": RoundToNearest}
"""By the name that `quantize` and --quantize take."""
