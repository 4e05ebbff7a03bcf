"""How the hot parts are computed: a folder an operation, whose reference implementation is its definition.

This room imports nothing else of ours.
"""
