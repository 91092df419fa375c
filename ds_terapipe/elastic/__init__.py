"""Freezes layers and reshapes the pipeline in a running training.

``settings`` are the keys of ``elastic_pipeline``, ``freeze`` says which layers are frozen at which step, ``resize`` which shape
the pipeline has then, ``sampler`` which samples a process reads.
"""
