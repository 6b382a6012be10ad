"""Split training between a thin edge and a cloud, without Flower (F22-F27)."""
