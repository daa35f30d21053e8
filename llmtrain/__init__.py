"""Pretrain language models from a YAML."""

__version__ = "0.1.0"
