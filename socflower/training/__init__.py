"""A training step on this machine, without Flower: trainers (FP32, int8, mixed precision) and batches."""
