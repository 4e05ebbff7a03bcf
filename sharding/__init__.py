"""Where a model is computed: the device mesh and the one table from logical axes to mesh axes.

This room imports nothing else of ours.
"""
