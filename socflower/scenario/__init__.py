"""Scenarios: a question in a TOML file, its run on an engine, and the check of its claims."""
