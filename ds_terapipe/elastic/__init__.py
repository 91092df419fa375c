"""Freezing of layers and reshaping of the pipeline during training.

``settings`` holds the keys of ``elastic_pipeline``. ``freeze`` decides which layers are frozen at a step, ``resize``
which shape the pipeline has then, ``sampler`` which samples a process reads.
"""
