"""socflower: train neural networks with Flower on clusters of small, hot, badly connected machines."""

__version__ = "0.1.0"
