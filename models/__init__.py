"""What is computed: model configurations, the Flax NNX decoder, and a file for each architecture family.

This room imports kernels and sharding, nothing else of ours.
"""
