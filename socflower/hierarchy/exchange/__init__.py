"""Frozen descriptions of exchanges: how members meet with gradients and groups with models, and what that sends."""
