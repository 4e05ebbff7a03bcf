"""Comparing a pipeline with a golden case: numbers made by other people's code (tests/data/golden/*/README.md)."""

from pallasite import GenerationConfig, Pipeline

MARGIN = 1e-3
"""Where the reference's best two logits are nearer than this, its choice is not asked for: its token is fed instead."""


def check_greedy(pipe: Pipeline, prompt: list[int], expected: list[int], margins: list[float]) -> int:
    """Greedy tokens equal the reference's wherever its margin is clear; returns how many were compared."""
    compared, done = 0, 0
    while done < len(expected):
        config = GenerationConfig(max_new_tokens=len(expected) - done, ignore_eos=True)
        got = pipe.generate(prompt + expected[:done], config).token_ids
        for token, right, margin in zip(got, expected[done:], margins[done:], strict=True):
            if margin < MARGIN:
                done += 1  # feed the golden token and go on
                break
            assert token == right, f"token {done}: {token} instead of {right}, margin {margin}"
            done += 1
            compared += 1
    return compared
