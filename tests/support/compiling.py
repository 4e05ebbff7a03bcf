"""How the tests compile: tiny models without optimization, which takes a fifth of the time.

It changes no arithmetic that a test could notice.
"""

import contextlib
from collections.abc import Iterator

from pallasite.serve import programs

_QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def compile_quickly() -> None:
    """From now on."""
    programs.COMPILER_OPTIONS.update(_QUICK)


@contextlib.contextmanager
def optimized() -> Iterator[None]:
    """As a user's programs are compiled: for the real model, which would be slow otherwise."""
    programs.COMPILER_OPTIONS.clear()
    try:
        yield
    finally:
        compile_quickly()
