"""Frozen descriptions of exchanges: how members exchange gradients and groups models, and what is sent."""
